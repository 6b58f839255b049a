"""Files that are complete or absent, checksums, and folders that one process owns at a time."""

import errno
import json
import os
import time
import zlib
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path
from secrets import token_hex
from typing import IO, Any

from ghostbatch.errors import InputError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


LOCK = ".lock"
FULL_DISK = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Numbers of the errors of a disk without space."""

LEFT_OVER_SECONDS = 600.0
"""Age from which a partial file of a name that anybody may write counts as left over."""


class DamagedError(Exception):
    """A file whose content cannot be used; the message says why."""


@contextmanager
def atomic_file(path: Path, previous: Path | None = None) -> Iterator[IO[bytes]]:
    """Yield a binary file that replaces ``path`` only when it is completely on disk.

    The file that had the name before is kept as ``previous``, if that is given. Several processes
    may write the same file: the last one wins.
    """
    partial = _partial_path(path)
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
            _keep_as(previous, path)
        partial.replace(path)
        if os.name == "posix":  # the new name must survive a power cut, too
            folder = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)


def _keep_as(previous: Path, path: Path) -> None:
    """Keep a file under a second name, too; without hard links it then lacks its first one."""
    if previous.exists() and previous.samefile(path):  # a writer was killed after this
        return
    link = _partial_path(path)
    try:
        os.link(path, link)
    except OSError:  # until `path` is written again, only the previous one is there
        path.replace(previous)
    else:
        link.replace(previous)


def _partial_path(path: Path) -> Path:
    """Return a new name for the unfinished file, so that several writers do not share one."""
    return path.with_name(f"{path.name}.{token_hex(4)}.partial")


def remove_leftovers(folder: Path, owned: Collection[str] = ()) -> None:
    """Remove the unfinished files that killed writers left in ``folder``.

    Those of the files ``owned``, which only the caller writes, are removed at once; others after
    ten minutes, because another process may still be writing them.
    """
    for path in folder.glob("*.partial"):
        try:
            old = time.time() - path.lstat().st_mtime > LEFT_OVER_SECONDS
            if old or any(path.name.startswith(f"{name}.") for name in owned):
                path.unlink()
        except OSError:  # another process has removed it, or may
            continue


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


def read_regular(path: Path) -> bytes:
    """Return the content of a file; refuse anything but a regular file."""
    check_regular(path)
    return path.read_bytes()


def check_regular(*paths: Path) -> None:
    """Refuse paths that exist and are no regular files: reading a fifo would never end."""
    for path in paths:
        if path.exists() and not path.is_file():
            raise InputError("out", f"{path} is not a regular file", "remove it")


def to_checked_json(fields: dict[str, Any], indent: int | None = None) -> bytes:
    """Return fields as the JSON of a text file, with a checksum of the others at the end."""
    return json.dumps({**fields, "checksum": _digest(fields)}, indent=indent).encode() + b"\n"


def read_checked_json(path: Path) -> dict[str, Any]:
    """Return the fields of a JSON file without their checksum; raise `DamagedError` if it differs.

    A file without a checksum, such as one written by hand, is read as it is.
    """
    fields = _parse(read_regular(path))
    if "checksum" in fields and fields.pop("checksum") != _digest(fields):
        raise DamagedError("has changed since it was written (its checksum differs)")
    return fields


def add_crc(line: str) -> str:
    """Return a line with a JSON object, with a CRC-32 of the bytes before it as its last field.

    >>> add_crc('{"update": 1}')
    '{"update": 1, "crc": "4fa2251b"}'
    """
    return f'{line[:-1]}, "crc": "{zlib.crc32(line[:-1].encode()):08x}"}}'


def parse_line(line: bytes) -> dict[str, Any]:
    """Return the object of a line without its CRC; raise `DamagedError` if it differs.

    A line without one, such as one of another program, is read as it is.
    """
    content, found, crc = line.rpartition(b', "crc": "')
    if found and crc != b'%08x"}' % zlib.crc32(content):
        raise DamagedError("has changed since it was written (its checksum differs)")
    fields = _parse(line)
    fields.pop("crc", None)
    return fields


def _parse(content: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(content.decode())
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict):
        raise DamagedError("cannot be read")
    return fields


def _digest(fields: dict[str, Any]) -> str:
    content = json.dumps(fields, sort_keys=True).encode()
    return blake2b(content, digest_size=16).hexdigest()


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
    is_new = not (folder / LOCK).exists()
    with no_empty_folders(folder), _locked(folder, patience) as descriptor:
        try:
            yield descriptor
        finally:
            with suppress(OSError):  # the block may have removed the folder
                if is_new and [path.name for path in folder.iterdir()] == [LOCK]:
                    (folder / LOCK).unlink()


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
    deadline = time.monotonic() + patience
    while (descriptor := _try_lock(folder)) is None:
        if time.monotonic() > deadline:
            problem = f"{folder} is in use by another process"
            raise InputError("out", problem, "wait or choose another")
        time.sleep(0.05)
    try:
        _held.add(descriptor)
        yield descriptor
    finally:
        _held.discard(descriptor)
        os.close(descriptor)


def _try_lock(folder: Path) -> int | None:
    """Lock a folder; return the descriptor, or None if another process holds the lock.

    Windows has no such lock: there nothing keeps two processes apart.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        problem = f"{folder} cannot be written to ({error.strerror})"
        raise InputError("out", problem, "choose another folder") from None
    try:
        if fcntl is not None:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if holds(folder, descriptor):  # else the file was removed since it was opened
            return descriptor
    except BlockingIOError:
        pass
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None


def holds(folder: Path, descriptor: int) -> bool:
    """Return whether the lock file of ``folder`` is still the one that ``descriptor`` has open.

    It is not when the folder or its lock file was removed: then another process may lock it.
    """
    try:
        return os.path.samestat(os.fstat(descriptor), (folder / LOCK).stat())
    except OSError:
        return False
