"""Runs that are killed at any moment, on full disks, in folders of others: nothing is lost."""

import os
import random
import signal
import subprocess
from collections import Counter
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path

import pytest

from ghostbatch.train import train
from ghostbatch.train.checkpoint import Checkpoints

EVERY = ("--checkpoint-updates", 1)


def assert_resumes(launch, command, out, whole, outcome):
    """Nothing is said, nothing is left over, and every number is that of the whole run."""
    again = launch(*command, "--out", out)
    assert again.wait() == 0, again.said
    assert outcome(out) == outcome(whole)
    assert not list(out.glob("*.partial"))
    return again


# ------------------------------------------------------------------------------ kill -9, anywhere


def kill_at(launch, command, out, number, everywhere=False):
    """Die just before the file operation of this number; tell whether it came to that."""
    fault = {"fault": "die_at", "number": number, "everywhere": everywhere}
    child = launch(*command, *EVERY, "--out", out, **fault)
    assert child.wait() in (0, -signal.SIGKILL, -signal.SIGXFSZ), child.said
    return child.code != 0


def test_a_run_killed_between_any_two_file_operations_of_a_checkpoint_ends_bit_identical(
    launch, small, tmp_path, whole, outcome
):
    found = []
    for number in range(9):
        out = tmp_path / str(number)
        assert kill_at(launch, small, out, number)
        found += what_is_there(out)
        again = assert_resumes(launch, small, out, whole, outcome)
        assert "update      0 " not in again.stdout.read_text(), "it began anew"
    assert found == [
        *("half written", "between two checkpoints", *["half written"] * 4),
        *["between two checkpoints"] * 3,
    ]


@pytest.mark.slow
def test_a_run_killed_before_every_file_operation_ends_bit_identical(
    launch, small, tmp_path, whole, outcome
):
    found, number = Counter(), 1
    while kill_at(launch, small, tmp_path / str(number), number, everywhere=True):
        found.update(what_is_there(tmp_path / str(number)))
        assert_resumes(launch, small, tmp_path / str(number), whole, outcome)
        number += 1
    print(f"{number - 1} operations: {dict(found)}")
    assert number > 150


def what_is_there(out: Path) -> list[str]:
    """The state that a killed run has left its folder in."""
    names = {path.name for path in out.iterdir()} if out.exists() else set()
    half = any(fnmatch(name, "checkpoint.pt.*.partial") for name in names)
    if not names - {".lock"}:
        return ["nothing written"]
    if not {"checkpoint.pt", "checkpoint.previous.pt"} & names:
        return ["half written"] if half else ["before the first checkpoint"]
    if "checkpoint.pt" not in names:
        return ["only the previous checkpoint"]
    if "summary.json" in names:
        return ["ended"]
    return ["half written"] if half else ["between two checkpoints"]


@pytest.mark.parametrize("kills", [5, pytest.param(100, marks=pytest.mark.slow)])
def test_a_run_killed_at_random_moments_ends_bit_identical(kills, launch, tmp_path, outcome):
    """Of the real network, whose checkpoints are 18 MB and so take a while to write."""
    command = (
        *("train", "f1-digits", "--device", "cpu", "--threads", 1, "--batch", 512, "--ghost", 64),
        *("--regime.epochs", 2, "--regime.drops", ",", "--evaluations", 2),
    )
    whole = tmp_path / "whole"
    child = launch(*command, *EVERY, "--out", whole)
    assert child.wait() == 0, child.said
    dice = random.Random(kills)  # noqa: S311 (no secret)
    found: Counter[str] = Counter()
    runs = 0
    while sum(found.values()) < kills:
        out = tmp_path / str(runs)
        child = launch(*command, *EVERY, "--out", out)
        code = child.wait(dice.uniform(0.0, 2.0))  # killed when the time is up
        assert not child.said, child.said
        if code is None:
            found.update(what_is_there(out))
        else:
            assert code == 0
            assert outcome(out) == outcome(whole)
            runs += 1
    assert_resumes(launch, command, out, whole, outcome)
    print(f"{kills} kills in {runs} runs: {dict(found)}")


# ----------------------------------------------------------------------------- one folder, two runs


def test_a_second_run_on_a_folder_is_refused_until_the_first_is_killed(
    launch, small, slowly, tmp_path, whole, outcome
):
    out = tmp_path / "run"
    fault, done = slowly(0.5)
    first = launch(*small, *EVERY, "--out", out, **fault)
    first.until(lambda: done() >= 1)
    second = launch(*small, "--out", out)
    assert second.wait() == 2
    assert second.said == [
        f"ghostbatch: out: {out} is in use by another process; wait or choose another"
    ]
    first.kill()
    assert first.wait() == -signal.SIGKILL
    assert_resumes(launch, small, out, whole, outcome)


# ------------------------------------------------------------------------------------- full disks


@pytest.mark.parametrize("name", ["checkpoint.pt", "summary.json"])
def test_a_full_disk_ends_the_run_in_one_line_and_keeps_the_last_checkpoint(
    name, launch, small, tmp_path, whole, outcome
):
    out = tmp_path / "run"
    fault = {"fault": "full_disk", "update": 9, "path": str(out / name)}
    child = launch(*small, *EVERY, "--out", out, **fault)
    assert child.wait() == 1
    assert child.said == [
        f"ghostbatch: {out / name}: No space left on device; "
        "free some space, or choose another folder"
    ]
    assert not list(out.glob("*.partial"))
    assert (out / "checkpoint.pt").exists()
    assert not (out / "summary.json").exists()
    assert_resumes(launch, small, out, whole, outcome)


def test_a_disk_too_full_for_a_record_ends_the_run_in_one_line(
    launch, small, tmp_path, whole, outcome
):
    out = tmp_path / "run"
    child = launch(*small, *EVERY, "--out", out, fault="full_disk_in_a_record", update=9)
    assert child.wait() == 1
    assert child.said == [
        f"ghostbatch: {out / 'metrics.jsonl'}: File too large; "
        "free some space, or choose another folder"
    ]
    assert (out / "metrics.jsonl").read_text()[-1] != "\n", "the last line was cut short"
    assert_resumes(launch, small, out, whole, outcome)


def test_a_disk_that_fills_up_inside_torch_save_is_named_as_such(launch, small, tmp_path):
    """torch.save then says something about positions in the file, with a traceback."""
    out = tmp_path / "run"
    child = launch(*small, *EVERY, "--out", out, fault="small_files", size=40_000)
    assert child.wait() == 1
    assert child.said == [
        f"ghostbatch: {out / 'checkpoint.pt'}: File too large; "
        "free some space, or choose another folder"
    ]
    assert {path.name for path in out.iterdir()} == {".lock", "run.json", "metrics.jsonl"}


@contextmanager
def small_disk(folder, size):
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("only root can mount a disk")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.slow
def test_a_real_disk_that_is_full_loses_nothing_however_full_it_is(
    launch, small, tmp_path, whole, outcome
):
    size = sum(path.stat().st_size for path in whole.iterdir())
    with small_disk(tmp_path / "disk", "20m") as disk:
        ends = Counter()
        for room in range(0, 5 * size, size // 8):
            out, filler = disk / f"run {room}", disk / "filler"
            filler.write_bytes(b"0" * max(0, 20 * 2**20 - room - 8192))
            child = launch(*small, *EVERY, "--out", out)
            ends[child.wait()] += 1
            assert len(child.said) == (child.code != 0), child.said
            filler.unlink()
            assert_resumes(launch, small, out, whole, outcome)
            for path in sorted(out.iterdir()):
                path.unlink()
    print(dict(ends))
    assert ends.keys() == {0, 1}


# -------------------------------------------------------------------------------- read-only folders


@pytest.mark.parametrize("out", ["/proc/run", "/sys/kernel/run", "/dev/null/run"])
def test_a_place_that_cannot_be_written_is_refused_in_one_line(launch, small, out):
    child = launch(*small, "--out", out)
    assert child.wait() == 2
    assert len(child.said) == 1
    assert child.said[0].startswith(f"ghostbatch: out: {out} cannot be written to (")
    assert child.said[0].endswith("; choose another folder")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_the_right_to_write_is_refused(tiny, tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(ValueError, match=r"^out: .* cannot be written to \(Permission denied\)"):
        train(tiny, out=tmp_path)


# ------------------------------------------------------------------------------ often enough saved


@pytest.mark.parametrize("every", [1, 4])
def test_checkpoints_are_never_more_updates_apart_than_asked(tiny, tmp_path, monkeypatch, every):
    saved = []

    def save(_self, state, metrics):
        assert metrics == (tmp_path / "metrics.jsonl").stat().st_size
        saved.append(state["update"])

    monkeypatch.setattr(Checkpoints, "save", save)
    train(tiny, out=tmp_path, checkpoint_seconds=1e9, checkpoint_updates=every)
    assert saved == [*range(every, 17, every), 16]
