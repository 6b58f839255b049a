"""Atomic files, the order in which a checkpoint reaches the disk, and locks."""

import errno
import os
import re
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from ghostbatch import train
from ghostbatch.files import atomic_file, locked, remove_leftovers
from ghostbatch.train.record import Recorder


def test_a_full_disk_is_reported_with_the_name_of_the_file(tmp_path):
    """On a full disk torch.save raises a RuntimeError; the OSError is its context."""

    def save(_file):
        try:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            raise RuntimeError("unexpected pos 5244288 vs 5244240")  # noqa: B904 (as torch.save does)

    with (
        pytest.raises(OSError, match="No space left on device") as caught,
        atomic_file(tmp_path / "name") as file,
    ):
        save(file)
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(tmp_path / "name"))
    assert list(tmp_path.iterdir()) == []


def test_other_errors_are_raised_unchanged_and_leave_the_old_file(tmp_path):
    (tmp_path / "name").write_text("before")

    def save(file):
        file.write(b"half of it")
        raise RuntimeError("unrelated")

    with pytest.raises(RuntimeError, match="unrelated"), atomic_file(tmp_path / "name") as file:
        save(file)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["before"]


def test_records_and_checkpoint_reach_the_disk_before_the_checkpoint_is_renamed(
    tiny, tmp_path, monkeypatch
):
    calls = []
    fsync, replace_file = os.fsync, os.replace

    def known(path):
        """The name without what makes it unique."""
        return re.sub(r"\.[0-9a-f]{8}\.partial$", ".partial", Path(path).name)

    def synced(descriptor):
        calls.append(("fsync", known(Path(f"/proc/self/fd/{descriptor}").readlink())))
        fsync(descriptor)

    def renamed(old, new):
        calls.append(("rename", known(old), known(new)))
        replace_file(old, new)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", renamed)
    out = tmp_path / "run"
    train(tiny, out=out, checkpoint_updates=8)
    second = calls.index(("rename", "checkpoint.pt.partial", "checkpoint.previous.pt")) - 2
    assert calls[second : second + 5] == [
        ("fsync", "metrics.jsonl"),
        ("fsync", "checkpoint.pt.partial"),
        ("rename", "checkpoint.pt.partial", "checkpoint.previous.pt"),
        ("rename", "checkpoint.pt.partial", "checkpoint.pt"),
        ("fsync", "run"),
    ]
    assert calls[-2:] == [("rename", "summary.json.partial", "summary.json"), ("fsync", "run")]


@pytest.mark.parametrize("links", [True, False], ids=["hard links", "no hard links"])
def test_a_file_that_is_replaced_keeps_the_one_before_and_is_always_there(
    tmp_path, monkeypatch, links
):
    target, previous = tmp_path / "new", tmp_path / "old"
    replace_file, seen = os.replace, []

    def replaced(source, name):
        replace_file(source, name)
        seen.append({path.name: path.read_text() for path in (target, previous) if path.exists()})

    def refused(*_):
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "replace", replaced)
    if not links:
        monkeypatch.setattr(os, "link", refused)
    for text in ("a", "b", "c"):
        with atomic_file(target, previous) as file:
            file.write(text.encode())
    between = ({"new": "a", "old": "a"}, {"new": "b", "old": "b"})
    if not links:
        between = ({"old": "a"}, {"old": "b"})
    assert seen == [
        {"new": "a"},
        between[0],
        {"new": "b", "old": "a"},
        between[1],
        {"new": "c", "old": "b"},
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "old"]


def test_a_writer_that_was_killed_while_both_names_are_one_file_leaves_nothing_behind(tmp_path):
    target, previous = tmp_path / "new", tmp_path / "old"
    target.write_text("a")
    previous.hardlink_to(target)
    with atomic_file(target, previous) as file:
        file.write(b"b")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"new": "b", "old": "a"}


@pytest.mark.parametrize("lr", [0.05, 1e25], ids=["finished", "diverged"])
def test_the_last_record_is_on_the_disk_before_the_summary_is(tiny, tmp_path, monkeypatch, lr):
    """After a power cut a run that has ended has all of its records."""
    fsync, replace_file = os.fsync, os.replace
    metrics, synced = tmp_path / "metrics.jsonl", []

    def sync(descriptor):
        fsync(descriptor)
        if os.path.samestat(os.fstat(descriptor), metrics.stat()):
            synced.append(metrics.stat().st_size)

    def rename(old, new):
        if Path(new).name == "summary.json":
            assert synced[-1] == metrics.stat().st_size
            synced.append("summary")
        replace_file(old, new)

    monkeypatch.setattr(os, "fsync", lambda d: sync(d) if metrics.exists() else fsync(d))
    monkeypatch.setattr(os, "replace", rename)
    train(replace(tiny, clip=None, regime=replace(tiny.regime, lr=lr, drops=())), out=tmp_path)
    assert synced[-1] == "summary"


def test_several_writers_of_one_file_do_not_disturb_each_other(tmp_path):
    target = tmp_path / "report.html"
    with atomic_file(target) as first:
        first.write(b"first")
        with atomic_file(target) as second:
            second.write(b"second")
        assert target.read_bytes() == b"second"
    assert target.read_bytes() == b"first"
    assert list(tmp_path.iterdir()) == [target]


def test_what_killed_writers_left_is_removed_and_what_others_write_is_not(tmp_path):
    def leave(name, age):
        (tmp_path / name).write_text("half")
        when = time.time() - age
        os.utime(tmp_path / name, (when, when))

    leave("run.json.01234567.partial", age=1)
    leave("checkpoint.pt.partial", age=1)  # as earlier versions named it
    leave("report.html.01234567.partial", age=1)
    leave("report.html.89abcdef.partial", age=3600)
    leave("mine", age=3600)
    remove_leftovers(tmp_path, owned=("run.json", "checkpoint.pt"))
    assert {path.name for path in tmp_path.iterdir()} == {"report.html.01234567.partial", "mine"}


def test_a_run_removes_what_a_killed_one_left(tiny, tmp_path):
    for name in ("run.json", "summary.json", "checkpoint.pt"):
        (tmp_path / f"{name}.01234567.partial").write_text("half")
    train(tiny, out=tmp_path)
    assert not list(tmp_path.glob("*.partial"))


def test_a_fork_does_not_keep_its_parents_lock(tmp_path):
    """Forked DataLoader workers may outlive a run that was killed."""
    with locked(tmp_path):
        child = os.fork()
        if child == 0:
            time.sleep(20)
            os._exit(0)
    try:
        with locked(tmp_path, patience=0.5):
            pass
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_resumed_recorder_starts_at_the_length_that_was_kept(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"x" * 1000)
    recorder = Recorder(path, 400, None)
    assert recorder.sync() == 400
    recorder.close()
