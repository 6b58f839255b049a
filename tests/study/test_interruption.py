"""Studies that are killed at random moments, and run again."""

import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from ghostbatch import train
from ghostbatch.files import locked
from ghostbatch.study import find_study
from ghostbatch.train import read_records

COLUMNS = ("LB", "+GBN")


def command(out: Path) -> list[str]:
    flags = ["--columns", ",".join(COLUMNS), "--seeds", "0", "--jobs", "2"]
    return [
        *(sys.executable, "-m", "ghostbatch", "study", "quick", "--out", str(out)),
        *(*flags, "--device", "cpu", "--checkpoint-seconds", "0.3"),
    ]


def start(out: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(command(out), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def workers_of(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(child) for child in children.read_text().split()] if children.exists() else []


def alive(pid: int) -> bool:
    """Return whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def press_ctrl_c(study: subprocess.Popen[str]) -> None:
    """Send SIGINT to the study and its workers, as a terminal does."""
    os.killpg(study.pid, signal.SIGINT)


def run_to_the_end(out: Path) -> str:
    done = subprocess.run(command(out), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of a study that was not interrupted."""
    out = tmp_path_factory.mktemp("whole")
    run_to_the_end(out)
    return out


def kill_at(out: Path, how: signal.Signals, after: float) -> bool:
    """Start the study, send it a signal, and check that it and its workers end.

    Return whether the signal ended it, and not the end of its runs or an early one of Python.
    """
    study = start(out)
    time.sleep(after)
    workers = workers_of(study.pid)
    study.send_signal(how)
    _, stderr = study.communicate(timeout=20)
    expected = {signal.SIGKILL: -9, signal.SIGTERM: 143, signal.SIGINT: 130}
    if study.returncode == expected[how]:
        assert "Traceback" not in stderr
    elif study.returncode != 0:  # neither finished nor past the start of Python
        early = {signal.SIGTERM: (-15,), signal.SIGINT: (-2, 1), signal.SIGKILL: ()}
        assert not workers, stderr
        assert study.returncode in early[how], stderr
    deadline = time.monotonic() + 5
    while any(alive(worker) for worker in workers):
        assert time.monotonic() < deadline, "a worker outlived its study"
        time.sleep(0.02)
    return study.returncode == expected[how]


def assert_same(out: Path, whole: Path, outcome) -> None:
    for column in COLUMNS:
        cell = Path("f1-digits") / column / "seed-0"
        assert outcome(out / cell) == outcome(whole / cell), column


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_study_continues_and_ends_bit_identical(how, whole, tmp_path, outcome):
    dice = random.Random(how)  # noqa: S311 (not for secrets)
    kill_at(tmp_path, how, after=3.5 + 2 * dice.random())
    table = run_to_the_end(tmp_path)
    assert_same(tmp_path, whole, outcome)
    assert "report: " in table


def rarely_saved(out: Path) -> subprocess.Popen[str]:
    """Start a study in its own process group, without checkpoints by time; wait until it works."""
    words = [word.replace("0.3", "1000") for word in command(out)]
    study = subprocess.Popen(words, stdout=-1, stderr=-1, text=True, start_new_session=True)
    cells = [out / "f1-digits" / column / "seed-0" / "metrics.jsonl" for column in COLUMNS]
    while not all(cell.exists() and cell.read_text().count("\n") > 20 for cell in cells):
        assert study.poll() is None
        time.sleep(0.01)
    return study


def test_at_the_first_ctrl_c_every_worker_saves_its_current_update(tmp_path, whole, outcome):
    study = rarely_saved(tmp_path)
    press_ctrl_c(study)
    _, stderr = study.communicate(timeout=20)
    assert study.returncode == 130
    assert stderr == "ghostbatch: interrupted; run the same command again to continue\n"
    for column in COLUMNS:
        cell = tmp_path / "f1-digits" / column / "seed-0"
        saved = torch.load(cell / "checkpoint.pt", weights_only=True)
        assert saved["metrics"] == (cell / "metrics.jsonl").stat().st_size, "a record is lost"
        assert saved["state"]["update"] >= read_records(cell / "metrics.jsonl")[-1].update > 0
    run_to_the_end(tmp_path)
    assert_same(tmp_path, whole, outcome)


def test_the_second_ctrl_c_kills_workers_that_do_not_save(tmp_path):
    study = rarely_saved(tmp_path)
    workers = workers_of(study.pid)
    for worker in workers:
        os.kill(worker, signal.SIGSTOP)
    press_ctrl_c(study)
    time.sleep(1)
    assert study.poll() is None, "the first one must wait"
    began = time.monotonic()
    press_ctrl_c(study)
    _, stderr = study.communicate(timeout=60)
    left = [worker for worker in workers if alive(worker)]
    for worker in left:
        os.kill(worker, signal.SIGKILL)
    assert not left
    assert time.monotonic() - began < 3
    assert study.returncode == 130
    assert stderr.count("\n") == 1
    assert not list(tmp_path.rglob("checkpoint.pt"))


@pytest.mark.slow
def test_a_study_killed_thirty_times_ends_bit_identical(whole, tmp_path, outcome):
    dice = random.Random(1)  # noqa: S311 (not for secrets)
    kills = 0
    for attempt in range(30):
        out = tmp_path / str(attempt // 5)
        how = dice.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
        kills += kill_at(out, how, after=6 * dice.random())
    for out in tmp_path.iterdir():
        run_to_the_end(out)
        assert_same(out, whole, outcome)
    assert kills >= 15


def test_finished_runs_are_not_touched_again(whole):
    cell = whole / "f1-digits" / "LB" / "seed-0"
    before = {path.name: path.stat().st_mtime_ns for path in cell.iterdir()}
    began = time.monotonic()
    run_to_the_end(whole)
    assert {path.name: path.stat().st_mtime_ns for path in cell.iterdir()} == before
    assert time.monotonic() - began < 20


def test_a_second_study_on_the_same_folder_is_refused(tmp_path):
    first = start(tmp_path)
    while not workers_of(first.pid):
        time.sleep(0.05)
    second = subprocess.run(command(tmp_path), capture_output=True, text=True, check=False)
    first.kill()
    first.communicate()
    assert second.returncode == 2
    assert second.stderr.count("\n") == 1
    assert "is in use by another process; wait or choose another" in second.stderr


def test_a_cell_with_damaged_checkpoints_fails_and_the_others_are_run(tmp_path, whole, outcome):
    (cell,) = find_study("quick").cells(["LB"], [0])
    folder = cell.folder(tmp_path)

    def interrupt(record):
        if record.update > 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(cell.recipe, out=folder, device="cpu", on_record=interrupt, checkpoint_seconds=0)
    for name in ("checkpoint.pt", "checkpoint.previous.pt"):
        (folder / name).write_bytes(b"not a checkpoint")
    done = subprocess.run(command(tmp_path), capture_output=True, text=True, check=False)
    assert done.returncode == 1
    first, last = done.stderr.splitlines()
    assert first.startswith(f"ghostbatch: {cell.name} failed: checkpoint: {folder}/checkpoint.pt ")
    assert first.endswith("; delete it to start this run again")
    assert (
        last == "ghostbatch: one part of the study failed; run the same command again to try again"
    )
    assert "report: " in done.stdout
    assert "LB: 1 of 1 not finished" in done.stdout
    other = Path("f1-digits") / "+GBN" / "seed-0"
    assert outcome(tmp_path / other) == outcome(whole / other)


def test_a_worker_that_dies_is_replaced_and_its_cell_continues(tmp_path, whole, outcome):
    study = rarely_saved(tmp_path)
    os.kill(workers_of(study.pid)[0], signal.SIGKILL)
    _, stderr = study.communicate(timeout=300)
    assert study.returncode == 0
    line = (
        r"ghostbatch: the worker for f1-digits .* seed 0 died \(SIGKILL\); a new one .*2 of 3\)\n"
    )
    assert re.fullmatch(line, stderr)
    assert_same(tmp_path, whole, outcome)


@pytest.mark.skipif(sys.platform != "linux", reason="needs a signal at the parent's death")
def test_workers_of_a_killed_study_free_its_lock_while_they_import(tmp_path):
    study = start(tmp_path)
    workers: list[int] = []
    while len(workers) < 2 or not all(map(imports_torch, workers)):
        time.sleep(0.005)
        workers = workers_of(study.pid)
    for worker in workers:  # as if the import took for ever
        os.kill(worker, signal.SIGSTOP)
    study.kill()
    study.wait()
    try:
        with locked(tmp_path, patience=0.5):
            pass
    finally:
        for worker in filter(alive, workers):
            os.kill(worker, signal.SIGKILL)
        study.communicate()


def imports_torch(pid: int) -> bool:
    """Return whether a process has begun to load torch's libraries."""
    try:
        return "libtorch" in Path(f"/proc/{pid}/maps").read_text()
    except FileNotFoundError:
        return False
