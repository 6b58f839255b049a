"""Cells side by side: what happens to one of them, and what that means for the others."""

import errno
import json
from dataclasses import replace
from threading import get_ident

import pytest

from ghostbatch.errors import InputError
from ghostbatch.study import Job, Row, Study, Where, find_study, run_cells, run_study
from ghostbatch.study.placement import Placement
from ghostbatch.train import Record, Summary, read_records


def ignore(*_):
    pass


def run(study, out, on_event=ignore, jobs=1):
    run_study(
        study, study.cells(out=out), out, jobs=jobs, on_event=on_event, where=Where(device="cpu")
    )


RECORD = Record(update=1, epoch=1.0, split="train", loss=1.0, accuracy=1.0, lr=1.0, distance=1.0)
SUMMARY = Summary(
    status="finished", accuracy=1.0, loss=1.0, updates=1, epochs=1.0, distance=1.0, seconds=1.0
)


class FakeExecutor:
    """Runs nothing: each job yields a record, and then its summary or an error."""

    def __init__(self, error=None):
        self.jobs, self.error = [], error

    def submit(self, job):
        self.jobs.append(job)
        return self.events()

    def events(self):
        yield RECORD
        if self.error is not None:
            raise self.error
        yield SUMMARY

    def close(self):
        pass


@pytest.fixture
def drive(tmp_path):
    """Run cells with a fake executor; return the events by the name of their cell."""

    def call(cells, executor, devices=("cpu",), jobs=2, data_dir=None):
        events = []
        run_cells(
            *(cells, tmp_path, executor, Placement(devices, jobs), Where(data_dir=data_dir)),
            lambda cell, event: events.append((cell.name, type(event).__name__, get_ident())),
        )
        return events

    return call


def test_any_executor_can_run_a_study_and_events_come_in_the_calling_thread(drive):
    cells = find_study("quick").cells(["SB", "LB"], [0, 1])
    events = drive(cells, FakeExecutor())
    assert {thread for *_, thread in events} == {get_ident()}
    for cell in cells:
        assert [kind for name, kind, _ in events if name == cell.name] == ["Record", "Summary"]


def test_jobs_say_what_to_run_in_which_folder_and_on_which_device(drive, tmp_path):
    executor = FakeExecutor()
    cells = find_study("quick").cells(["SB"], [0, 1])
    drive(cells, executor, devices=("cuda:0", "cuda:1"), data_dir="here")
    assert [job.recipe for job in executor.jobs] == [cell.recipe for cell in cells]
    assert [job.folder for job in executor.jobs] == [cell.folder(tmp_path) for cell in cells]
    assert executor.jobs[0].where == Where(device="cuda:0", data_dir="here")
    assert executor.jobs[1].where == Where(device="cuda:1", data_dir="here")


def test_what_a_job_raises_ends_the_study(drive):
    refusal = InputError("micro", "64 samples do not fit", "use micro 32")
    with pytest.raises(InputError, match="64 samples do not fit"):
        drive(find_study("quick").cells(["SB"], [0]), FakeExecutor(refusal))


def test_a_follower_is_submitted_when_its_reference_has_ended(tmp_path):
    executor = FakeExecutor()
    cells = find_study("diffusion").cells(["by distance"], [0], tmp_path)
    ended_before = {}

    def note(cell, event):
        if isinstance(event, Summary):
            ended_before[cell.column] = len(executor.jobs)

    run_cells(cells, tmp_path, executor, Placement(["cpu"], 8), Where(), note)
    assert ended_before == {"SB": 1, "by distance": 2}


def test_a_job_survives_json(tiny, tmp_path):
    job = Job("row column seed 0", tiny, tmp_path / "run", Where(device="cuda:1", micro=32))
    assert Job.from_dict(json.loads(json.dumps(job.as_dict()))) == job


def test_a_study_goes_on_with_its_other_cells_when_one_diverges(tiny, tmp_path):
    hot = replace(tiny, clip=None, regime=replace(tiny.regime, lr=1e25, drops=()))
    study = Study("small", {"tiny": Row({"hot": hot, "mild": tiny})}, seeds=(0,))
    ended = {}

    def note(cell, event):
        if isinstance(event, Summary):
            ended[cell.column] = (event.status, event.reason)

    run(study, tmp_path, note)
    assert ended["hot"][0] == "diverged"
    assert ended["hot"][1].startswith("update 2: the loss is nan, first in the output of layer ")
    assert ended["mild"] == ("finished", None)
    assert read_records(tmp_path / "tiny" / "mild" / "seed-0" / "metrics.jsonl")[-1].update == 16


def test_a_full_disk_is_reported_as_such_and_not_as_a_dead_worker(tiny, tmp_path, capfd):
    folder = tmp_path / "tiny" / "one" / "seed-0"
    folder.mkdir(parents=True)
    (folder / "checkpoint.pt.partial").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left on device") as caught:
        run(Study("small", {"tiny": Row({"one": tiny})}, seeds=(0,)), tmp_path)
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.filename == str(folder / "checkpoint.pt")
    assert capfd.readouterr() == ("", "")


def test_a_run_that_follows_another_starts_when_that_one_has_ended(tiny, tmp_path):
    base = replace(tiny, batch=32, lr_rule="none", ghost=None)
    follower = replace(tiny, hold="distance", reference="SB")
    study = Study("small", {"row": Row({"far": follower, "SB": base})}, seeds=(0,))
    assert [cell.column for cell in study.cells(out=tmp_path)] == ["SB", "far"]
    ended = []

    def note(cell, event):
        if isinstance(event, Summary):
            ended.append(cell.column)

    run(study, tmp_path, note, jobs=2)
    assert ended == ["SB", "far"]
    header = json.loads((tmp_path / "row" / "far" / "seed-0" / "run.json").read_text())
    assert header["recipe"]["reference"] == str(tmp_path / "row" / "SB" / "seed-0")


def test_a_run_whose_reference_diverged_is_left_out_and_the_study_goes_on(tiny, tmp_path):
    hot = replace(tiny.regime, lr=1e25)
    base = replace(tiny, batch=32, lr_rule="none", ghost=None, clip=None, regime=hot)
    follower = replace(tiny, hold="distance", reference="SB", regime=hot, clip=None)
    study = Study("small", {"row": Row({"SB": base, "far": follower})}, seeds=(0,))
    with pytest.warns(UserWarning, match="row far seed 0 is left out: the run that it follows"):
        run(study, tmp_path)
    assert not (tmp_path / "row" / "far").exists()
