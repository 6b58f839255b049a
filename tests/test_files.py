"""Atomic files, the order in which a checkpoint reaches the disk, and locks."""

import errno
import os
import re
import signal
import time
from pathlib import Path

import pytest

from ghostbatch import train
from ghostbatch.files import atomic_file, locked
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
    fsync, replace = os.fsync, os.replace

    def known(path):
        """The name without what makes it unique."""
        return re.sub(r"\.[0-9a-f]{8}\.partial$", ".partial", Path(path).name)

    def synced(descriptor):
        calls.append(("fsync", known(Path(f"/proc/self/fd/{descriptor}").readlink())))
        fsync(descriptor)

    def renamed(old, new):
        calls.append(("rename", known(old), known(new)))
        replace(old, new)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", renamed)
    out = tmp_path / "run"
    train(tiny, out=out, checkpoint_updates=8)
    second = calls.index(("rename", "checkpoint.pt", "checkpoint.previous.pt")) - 2
    assert calls[second : second + 5] == [
        ("fsync", "metrics.jsonl"),
        ("fsync", "checkpoint.pt.partial"),
        ("rename", "checkpoint.pt", "checkpoint.previous.pt"),
        ("rename", "checkpoint.pt.partial", "checkpoint.pt"),
        ("fsync", "run"),
    ]
    assert calls[-2:] == [("rename", "summary.json.partial", "summary.json"), ("fsync", "run")]


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
