"""Files that are either complete or absent, and folders that one process owns at a time."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from ghostbatch.errors import InputError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


@contextmanager
def atomic_file(path: Path, previous: Path | None = None) -> Iterator[IO[bytes]]:
    """Yield a binary file that replaces ``path`` only when it is completely on disk.

    The file that had the name before is kept as ``previous``, if that is given. At every moment
    one of the two is complete.
    """
    partial = path.with_name(path.name + ".partial")
    with errors_name(path):
        try:
            with partial.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
        except BaseException:
            partial.unlink(missing_ok=True)  # on a full disk, free its space
            raise
        if previous is not None and path.exists():
            path.replace(previous)
        partial.replace(path)
        if os.name == "posix":  # the new name must survive a power cut, too
            folder = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)


@contextmanager
def errors_name(path: Path) -> Iterator[None]:
    """Re-raise an operating system error with the name of the file that it is about.

    On a full disk torch.save raises a RuntimeError about positions in the file; the operating
    system's own error is its context.
    """
    try:
        yield
    except (OSError, RuntimeError) as error:
        cause = error if isinstance(error, OSError) else error.__context__
        if not isinstance(cause, OSError):
            raise
        raise OSError(cause.errno, cause.strerror, str(path)) from None


_held: set[int] = set()
"""Descriptors of the locks that this process holds."""


def _close_in_child() -> None:
    """Close the parent's locks in a forked child, so that they end with the parent."""
    while _held:
        os.close(_held.pop())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)


@contextmanager
def locked(folder: Path, patience: float = 3.0) -> Iterator[int]:
    """Own ``folder`` (created if it does not exist) until the block or this process ends.

    Yields the descriptor that holds the lock. A program that inherits the descriptor keeps the
    folder locked too; a fork of this process does not. The operating system drops the lock when a
    process dies. ``patience`` is how many seconds to wait for a holder that is about to end.
    If nothing was written, the lock file and the folder that this call made are removed again.
    """
    is_new = not (folder / ".lock").exists()
    with no_empty_folders(folder), _locked(folder, patience) as descriptor:
        try:
            yield descriptor
        finally:
            with suppress(OSError):  # the block may have removed the folder
                if is_new and [path.name for path in folder.iterdir()] == [".lock"]:
                    (folder / ".lock").unlink()


@contextmanager
def no_empty_folders(folder: Path) -> Iterator[None]:
    """Remove ``folder`` and its parents in the end, if the block made them and they are empty."""
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        yield
    finally:
        for path in made:
            with suppress(OSError):  # it is not empty, or was not made
                path.rmdir()


@contextmanager
def _locked(folder: Path, patience: float) -> Iterator[int]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        problem = f"{folder} cannot be written to ({error.strerror})"
        raise InputError("out", problem, "choose another folder") from None
    try:
        deadline = time.monotonic() + patience
        while not _try_lock(descriptor):
            if time.monotonic() > deadline:
                raise InputError(
                    "out", f"{folder} is in use by another process", "wait or choose another"
                )
            time.sleep(0.05)
        _held.add(descriptor)
        yield descriptor
    finally:
        _held.discard(descriptor)
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    """Lock an open file; return False if another process holds it.

    Windows has no such lock: there nothing keeps two processes apart.
    """
    try:
        if fcntl is not None:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
