"""Files that are whole or absent, and folders that one process owns at a time."""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from ghostbatch.errors import InputError


@contextmanager
def atomic_file(path: Path, previous: Path | None = None) -> Iterator[IO[bytes]]:
    """Write a file that appears under its name only when all of it is on the disk.

    What had the name before is kept as ``previous``, if that is given. At every moment one of the
    two is whole.
    """
    partial = path.with_name(path.name + ".partial")
    with naming(path):
        try:
            with partial.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
        except BaseException:
            partial.unlink(missing_ok=True)  # a full disk needs the room
            raise
        if previous is not None and path.exists():
            path.replace(previous)
        partial.replace(path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)  # the new name must survive a power cut too
        finally:
            os.close(folder)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Have what the system refuses say which file it was about.

    On a full disk torch.save raises a RuntimeError about positions in the file; what the system
    said is behind it.
    """
    try:
        yield
    except (OSError, RuntimeError) as error:
        cause = error if isinstance(error, OSError) else error.__context__
        if not isinstance(cause, OSError):
            raise
        raise OSError(cause.errno, cause.strerror, str(path)) from None


_held: set[int] = set()


def _let_go() -> None:
    """In a forked child: the lock is its parent's, and must end with it."""
    while _held:
        os.close(_held.pop())


os.register_at_fork(after_in_child=_let_go)


@contextmanager
def locked(folder: Path, patience: float = 3.0) -> Iterator[int]:
    """Own ``folder`` (made if need be) until the block ends, or this process does.

    Yields the descriptor that holds the lock. A program that is started with it keeps the folder
    locked too; a fork of this one does not. The lock is the kernel's, so nothing is left behind by
    a process that was killed; ``patience`` is the time that programs it started get to notice.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        problem = f"{folder} cannot be written to ({error.strerror})"
        raise InputError("out", problem, "choose another folder") from None
    try:
        deadline = time.monotonic() + patience
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise InputError(
                        "out", f"{folder} is in use by another process", "wait or choose another"
                    ) from None
                time.sleep(0.05)
        _held.add(descriptor)
        yield descriptor
    finally:
        _held.discard(descriptor)
        os.close(descriptor)
