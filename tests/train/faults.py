"""Faults to inject into a run: each function patches what a run uses, before it starts."""

import io
import os
import resource
import signal
import time
from pathlib import Path

from ghostbatch import files
from ghostbatch.train.checkpoint import Checkpoints
from ghostbatch.train.record import Recorder
from ghostbatch.train.update import Update


def slow_updates(seconds, log=None):
    """Make each update take ``seconds`` longer, and append a line to ``log`` when it is done."""
    update = Update.__call__

    def slow(self, **options):
        time.sleep(seconds)
        update(self, **options)
        if log is not None:
            with Path(log).open("a") as file:
                file.write("done\n")

    Update.__call__ = slow


def die_at(number, everywhere):
    """Kill the process before its file operation ``number``, counted from the start or from the
    fifth checkpoint; number 0 dies inside that checkpoint's torch.save.
    """  # noqa: D205
    save, saves, count = Checkpoints.save, 0, 0

    def counted(self, *arguments):
        nonlocal saves
        saves += 1
        if (saves, number) == (5, 0):  # the kernel kills a process that writes too much
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
            limit_file_size(40_000)
        save(self, *arguments)

    def dying(call):
        def die(*arguments, **options):
            nonlocal count
            count += everywhere or saves == 5
            if count and count == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*arguments, **options)

        return die

    Checkpoints.save = counted
    for name in ("fsync", "link", "replace", "open", "close", "unlink"):
        setattr(os, name, dying(getattr(os, name)))
    io.open = dying(io.open)


def full_disk(update, path):
    """After an update, let ``path`` be written to a disk that is full."""
    run, partial_path = Update.__call__, files._partial_path

    def on_the_full_disk(target):
        partial = partial_path(target)
        if target == Path(path):
            partial.symlink_to("/dev/full")
        return partial

    def filling(self, **options):
        run(self, **options)
        if self.state.update == update:
            files._partial_path = on_the_full_disk

    Update.__call__ = filling


def full_disk_in_a_record(update):
    """Leave room for 20 more bytes when the record of an update is written."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    write = Recorder.write

    def full(self, record):
        if record.update == update:
            limit_file_size(self.sync() + 20)
        write(self, record)

    Recorder.write = full


def small_files(size):
    """Refuse to write files larger than ``size`` bytes."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limit_file_size(size)


def limit_file_size(size):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
