"""Cells side by side: what happens to one of them, and what that means for the others."""

import errno
import json
import pickle
import resource
import traceback
from dataclasses import replace
from threading import get_ident
from time import process_time

import pytest
from fake_executor import FakeExecutor

from ghostbatch.errors import InputError
from ghostbatch.study import (
    Failure,
    Row,
    Study,
    Where,
    WorkerDied,
    find_study,
    run_study,
)
from ghostbatch.study.executor import Job
from ghostbatch.study.placement import Placement
from ghostbatch.study.runner import CellRunner
from ghostbatch.train import Record, Summary, read_records


def ignore(*_):
    pass


def run(study, out, on_event=ignore, jobs=1):
    run_study(
        study, study.cells(out=out), out, jobs=jobs, on_event=on_event, where=Where(device="cpu")
    )


@pytest.fixture
def drive(tmp_path):
    """Run cells with a fake executor; return failures, events by their columns, and jobs."""

    def call(cells, error=None, devices=("cpu",), jobs=1, **where):
        executor, events = FakeExecutor(error), []
        failures = CellRunner(
            *(tmp_path, executor, Placement(devices, jobs), Where(**where)),
            lambda cell, event: events.append((cell.column, type(event).__name__, get_ident())),
        ).run(cells)
        assert {thread for *_, thread in events} == {get_ident()}
        return failures, [event[:2] for event in events], executor.jobs

    return call


def columns_of(jobs):
    return [job.name.split()[1] for job in jobs]


def test_cells_that_have_ended_need_not_fit_other_micro_batches(tiny, tmp_path):
    study = Study("small", {"tiny": Row({"one": tiny})}, seeds=(0,))
    run(study, tmp_path)
    where = Where(device="cpu", micro=24)
    run_study(study, study.cells(), tmp_path, jobs=1, on_event=ignore, where=where)
    with pytest.raises(InputError, match=r"^micro: tiny one seed 1: batch 64 does not split into"):
        run_study(study, study.cells(seeds=[1]), tmp_path, jobs=1, on_event=ignore, where=where)


def test_the_folder_of_a_run_is_refused(tiny, tmp_path):
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(InputError, match=r"^out: .* holds a single run; choose another folder"):
        run(Study("small", {"tiny": Row({"one": tiny})}), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


def test_any_executor_can_run_a_study_and_events_come_in_the_calling_thread(drive):
    _, events, _ = drive(find_study("quick").cells(["SB", "LB"], [0]), jobs=2)
    for column in ("SB", "LB"):
        assert [kind for name, kind in events if name == column] == ["Record", "Summary"]


def test_without_jobs_the_cells_run_in_this_thread_one_after_another(tiny, tmp_path):
    study = Study("small", {"tiny": Row({"one": tiny, "two": tiny})}, seeds=(0,))
    seen = []

    def note(cell, event):
        inside = any(frame.name == "train" for frame in traceback.extract_stack())
        assert inside == isinstance(event, Record)
        seen.append(cell.column)

    run(study, tmp_path, note, jobs=0)
    assert seen == sorted(seen)
    assert set(seen) == {"one", "two"}


def test_without_jobs_a_refused_cell_fails_and_the_others_are_run(tiny, tmp_path):
    refused = replace(tiny, model="python:small_networks:lazy", ghost=None)
    study = Study("small", {"tiny": Row({"bad": refused, "good": tiny})}, seeds=(0,))
    cells, where = study.cells(out=tmp_path), Where(device="cpu")
    (failure,) = run_study(study, cells, tmp_path, jobs=0, on_event=ignore, where=where)
    assert failure.name == "tiny bad seed 0"
    assert read_records(tmp_path / "tiny" / "good" / "seed-0" / "metrics.jsonl")[-1].update == 16


def test_jobs_say_what_to_run_in_which_folder_and_on_which_device(drive, tmp_path):
    cells = find_study("quick").cells(["SB"], [0, 1])
    *_, jobs = drive(cells, devices=("cuda:0", "cuda:1"), jobs=2, data_dir="here")
    assert [job.recipe for job in jobs] == [cell.recipe for cell in cells]
    assert [job.folder for job in jobs] == [cell.folder(tmp_path) for cell in cells]
    assert jobs[0].where == Where(device="cuda:0", data_dir="here")
    assert jobs[1].where == Where(device="cuda:1", data_dir="here")


def test_only_cells_with_ghosts_and_a_larger_batch_are_split_into_micro_batches(drive):
    *_, jobs = drive(find_study("quick").cells(seeds=[0]), micro=256)
    micros = dict(zip(columns_of(jobs), (job.where.micro for job in jobs), strict=True))
    assert micros == {"SB": None, "LB": None, "+LR": None, "+GBN": 256, "+RA": 256}


@pytest.fixture
def crowded(drive, tiny, tmp_path):
    """Run three cells on one GPU that two large ones do not fit; return the order of their jobs."""

    def call(micro=None, **small):
        large = replace(tiny, data="synthetic:3x32x32:4096", batch=1024, base_batch=1024)
        third = replace(large, batch=64, base_batch=64, **small)
        row = Row({"first": large, "second": large, "third": third})
        cells = Study("small", {"row": row}, seeds=(0,)).cells(out=tmp_path)
        cells.sort(key=lambda cell: cell.column)
        return columns_of(drive(cells, devices=("cuda:0",), jobs=8, micro=micro)[2])

    return call


def test_a_job_that_has_to_wait_does_not_hold_up_the_jobs_behind_it(crowded):
    assert crowded() == ["first", "third", "second"]


def test_micro_batches_let_large_jobs_share_a_gpu(crowded):
    assert crowded(micro=256) == ["first", "second", "third"]


@pytest.mark.parametrize("reference", ["first", "second"], ids=["running", "waiting"])
def test_a_follower_waits_for_its_reference(crowded, reference):
    order = crowded(hold="distance", reference=reference)
    assert order.index(reference) < order.index("third")


REFUSAL = InputError("checkpoint", "it cannot be read", "delete it")


@pytest.mark.parametrize("columns", [["SB"], ["SB", "LB"]], ids=["the-only-one", "all"])
def test_a_refusal_that_all_cells_share_is_raised(drive, columns):
    with pytest.raises(InputError, match="it cannot be read"):
        drive(find_study("quick").cells(columns, [0]), REFUSAL)


def only(column, *errors):
    """Return a function of a job: the next of ``errors`` for that column, and then None."""
    left = list(errors)

    def error(job):
        return left.pop(0) if left and job.name.split()[1] == column else None

    return error


def died(how="SIGKILL"):
    return WorkerDied("f1-digits SB seed 0", how)


def test_a_refused_cell_fails_at_once_and_the_others_go_on(drive):
    cells = find_study("quick").cells(["SB", "LB"], [0])
    failures, events, jobs = drive(cells, only("SB", REFUSAL))
    assert failures == [Failure("f1-digits SB seed 0", str(REFUSAL))]
    assert columns_of(jobs) == ["SB", "LB"]
    ended = [("SB", "Record"), ("SB", "Failure"), ("LB", "Record"), ("LB", "Summary")]
    assert events == ended


def test_a_cell_whose_worker_dies_is_tried_again_after_the_others(drive):
    cells = find_study("quick").cells(["SB", "LB"], [0])
    retry = r"^the worker for f1-digits SB seed 0 died \(SIGKILL\); .*attempt 2 of 3"
    with pytest.warns(UserWarning, match=retry):
        failures, events, jobs = drive(cells, only("SB", died()))
    assert failures == []
    assert columns_of(jobs) == ["SB", "LB", "SB"]
    assert events[-1] == ("SB", "Summary")


@pytest.mark.filterwarnings("ignore:the worker for")
def test_a_cell_whose_worker_dies_three_times_has_failed(drive):
    cells = find_study("quick").cells(["SB", "LB"], [0])
    failures, events, jobs = drive(cells, only("SB", died(), died(), died("exit code 1")))
    reason = "its worker died 3 times, the last time by exit code 1"
    assert failures == [Failure("f1-digits SB seed 0", reason)]
    assert columns_of(jobs) == ["SB", "LB", "SB", "SB"]
    assert ("LB", "Summary") in events


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS])
def test_a_full_disk_ends_the_study_because_every_cell_would_meet_it(drive, number):
    cells = find_study("quick").cells(["SB", "LB"], [0])
    with pytest.raises(OSError, match="full") as caught:
        drive(cells, only("SB", OSError(number, "full", "checkpoint.pt")))
    assert caught.value.errno == number


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError(errno.EACCES, "Permission denied", "run.json"), "run.json: Permission denied"),
        (OSError("image file\nis truncated"), "file: image file is truncated"),
    ],
    ids=["of-the-system", "of-a-library"],
)
def test_another_error_of_a_file_concerns_its_cell_only(drive, error, reason):
    cells = find_study("quick").cells(["SB", "LB"], [0])
    failures, *_ = drive(cells, only("SB", error))
    assert failures == [Failure("f1-digits SB seed 0", reason)]


def test_a_cell_that_follows_a_failed_one_is_left_out(drive, tmp_path):
    cells = find_study("diffusion").cells(["by distance"], [0, 1], tmp_path)
    refused = iter([REFUSAL])
    with pytest.warns(UserWarning, match=r"is left out: the run that it follows failed$") as warned:
        failures, events, _ = drive(
            cells, lambda job: next(refused, None) if "SB" in job.name else None
        )
    assert len(warned) == len(failures) == 1
    assert [event for event in events if event[1] == "Summary"] == [
        ("SB", "Summary"),
        ("by distance", "Summary"),
    ]


@pytest.mark.filterwarnings("ignore:the worker for")
def test_a_follower_waits_for_a_reference_that_is_tried_again(drive, tmp_path):
    cells = find_study("diffusion").cells(["by distance"], [0], tmp_path)
    deaths = iter([died(), died()])
    order = drive(cells, lambda _job: next(deaths, None))[1]
    assert order[-1] == ("by distance", "Summary")
    assert order.index(("SB", "Summary")) < order.index(("by distance", "Record"))


def test_a_damaged_cell_fails_and_the_study_goes_on(tiny, tmp_path):
    study = Study("small", {"tiny": Row({"bad": tiny, "good": tiny})}, seeds=(0,))
    folder = tmp_path / "tiny" / "bad" / "seed-0"
    folder.mkdir(parents=True)
    (folder / "run.json").write_bytes(b"\xff")
    cells = study.cells(out=tmp_path)
    (failure,) = run_study(
        study, cells, tmp_path, jobs=1, on_event=ignore, where=Where(device="cpu")
    )
    assert failure.name == "tiny bad seed 0"
    assert str(folder / "run.json") in failure.reason
    assert read_records(tmp_path / "tiny" / "good" / "seed-0" / "metrics.jsonl")[-1].update == 16


def test_a_thousand_waiting_cells_are_scheduled_in_seconds(drive, tmp_path):
    """When a cell ends, all that wait are looked at."""
    cells = find_study("quick").cells(["SB"], range(1000), tmp_path)
    began = process_time()
    failures, _, jobs = drive(cells, None)
    assert process_time() - began < 5
    assert failures == []
    assert len(jobs) == 1000


def test_a_follower_is_submitted_when_its_reference_has_ended(tmp_path):
    executor = FakeExecutor()
    cells = find_study("diffusion").cells(["by distance"], [0], tmp_path)
    ended_before = {}

    def note(cell, event):
        if isinstance(event, Summary):
            ended_before[cell.column] = len(executor.jobs)

    CellRunner(tmp_path, executor, Placement(["cpu"], 8), Where(), note).run(cells)
    assert ended_before == {"SB": 1, "by distance": 2}


def test_a_job_survives_being_sent_to_another_process(tiny, tmp_path):
    job = Job("row column seed 0", tiny, tmp_path / "run", Where(device="cuda:1", micro=32))
    assert pickle.loads(pickle.dumps(job)) == job  # noqa: S301 (our own)


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


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("summary.json", "cannot be read; it is written again from the last checkpoint"),
        ("run.json", "cannot be read; it was rebuilt from the checkpoint"),
    ],
)
def test_a_cell_with_a_damaged_file_is_repaired(tiny, tmp_path, caplog, name, said):
    study = Study("small", {"tiny": Row({"one": tiny})}, seeds=(0,))
    ended = []

    def note(_, event):
        if isinstance(event, Summary):
            ended.append(replace(event, seconds=0.0))

    run(study, tmp_path, note)
    (tmp_path / "tiny" / "one" / "seed-0" / name).write_text("{")
    run(study, tmp_path, note)
    assert ended == [ended[0]] * 2
    (line,) = (record.getMessage() for record in caplog.records if name in record.getMessage())
    assert line.endswith(f"{name} {said}")
    run(study, tmp_path, note)
    assert len(caplog.records) == 1


def test_a_full_disk_is_reported_as_such_and_not_as_a_dead_worker(tiny, tmp_path, capfd):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, limits[1]))  # for the worker, too
    try:
        with pytest.raises(OSError, match="File too large") as caught:
            run(Study("small", {"tiny": Row({"one": tiny})}, seeds=(0,)), tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caught.value.errno == errno.EFBIG
    assert caught.value.filename == str(tmp_path / "tiny" / "one" / "seed-0" / "checkpoint.pt")
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
