"""The folder of compiled libraries, $XDG_CACHE_HOME/ghostbatch or ~/.cache/ghostbatch.

A library runs as soon as it is loaded, so one that somebody else may have put there is not loaded:
folder and file must be this user's, and nobody else may be able to write them. They are opened
first and checked then, so what was checked is what is loaded.
"""

import ctypes
import hashlib
import os
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

BUILD = "build-"
"""How the names of folders begin in which a library is being compiled."""

OLD = 3600.0
"""Seconds after which such a folder was left behind by a killed process: compiling takes 4 minutes
at most."""

CHECKSUM = hashlib.sha256().digest_size
OTHERS = stat.S_IWGRP | stat.S_IWOTH


@dataclass(frozen=True)
class CacheFolder:
    """A folder that only this user can write to."""

    path: Path
    descriptor: int

    def load(self, name: str) -> ctypes.CDLL | None:
        """Return a library, or None if it is not there, incomplete, or not only this user's."""
        # Without O_NONBLOCK a named pipe would be waited for.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            opened = os.open(name, flags, dir_fd=self.descriptor)
        except OSError:  # not there, or a symbolic link
            return None
        with os.fdopen(opened, "rb") as file:
            seen = os.fstat(opened)
            if not stat.S_ISREG(seen.st_mode) or not _is_own(seen) or seen.st_mode & OTHERS:
                return None
            content = file.read()
        if hashlib.sha256(content[:-CHECKSUM]).digest() != content[-CHECKSUM:]:
            return None  # one cut short would crash Python
        return ctypes.CDLL(f"/proc/self/fd/{self.descriptor}/{name}")

    def keep(self, built: Path, name: str) -> ctypes.CDLL:
        """Load a library that was compiled in this folder, and keep it under a name."""
        with built.open("ab") as file:
            file.write(hashlib.sha256(built.read_bytes()).digest())
        built.chmod(0o700)
        library = ctypes.CDLL(str(built))
        os.replace(built, name, dst_dir_fd=self.descriptor)
        return library


@contextmanager
def open_cache() -> Iterator[CacheFolder]:
    """Yield the cache folder, made if there is none; raise OSError if it cannot be used or trusted.

    One that others could write to is closed to them, and what it held is removed.
    """
    path = _root() / "ghostbatch"
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        seen = os.fstat(descriptor)
        if not _is_own(seen) or not os.access(path, os.W_OK):
            raise PermissionError(f"{path} is not a folder of this user's")
        if stat.S_IMODE(seen.st_mode) != 0o700:
            os.fchmod(descriptor, 0o700)
        if seen.st_mode & OTHERS:
            _empty(descriptor)
        if os.fstat(descriptor).st_mode & OTHERS:  # some file systems have no modes
            raise PermissionError(f"others can write to {path}")
        yield CacheFolder(path, descriptor)
    finally:
        os.close(descriptor)


def remove_leftovers(folder: Path, prefix: str) -> None:
    """Remove folders of killed compilations: this user's, old, and so named."""
    for entry in os.scandir(folder):
        if not entry.name.startswith(prefix) or not entry.is_dir(follow_symlinks=False):
            continue
        with suppress(OSError):  # another process may remove it
            seen = entry.stat(follow_symlinks=False)
            if _is_own(seen) and seen.st_mtime < time.time() - OLD:
                shutil.rmtree(entry.path)


def _root() -> Path:
    """Return the folder of all caches; raise PermissionError if others can rename what it holds."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    seen = root.stat()
    # With the sticky bit, as in /tmp, others can add to a folder, but not rename what is ours.
    if seen.st_uid not in (os.geteuid(), 0) or (
        seen.st_mode & OTHERS and not seen.st_mode & stat.S_ISVTX
    ):
        raise PermissionError(f"others can write to {root}")
    return root


def _is_own(seen: os.stat_result) -> bool:
    return seen.st_uid == os.geteuid()


def _empty(descriptor: int) -> None:
    """Remove the files of a folder."""
    for entry in os.scandir(descriptor):
        if not entry.is_dir(follow_symlinks=False):
            with suppress(FileNotFoundError):  # another process may remove it
                os.unlink(entry.name, dir_fd=descriptor)
