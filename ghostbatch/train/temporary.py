"""Temporary folders of runs that have no ``out``; those of killed runs are removed by the next."""

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir

from ghostbatch.errors import InputError
from ghostbatch.files import locked

PREFIX = "ghostbatch-run-"

YOUNG = 60.0
"""Seconds after which a folder without an owner is left over: a new run may not have locked it."""


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """Yield a new folder that this process has locked, and remove it in the end."""
    if os.name == "posix":  # elsewhere no lock tells which folders are in use
        remove_leftovers()
    with (
        TemporaryDirectory(prefix=PREFIX, ignore_cleanup_errors=True) as name,
        locked(Path(name)),
    ):
        yield Path(name)


def remove_leftovers() -> None:
    """Remove the temporary folders of this user's runs that were killed."""
    for folder in Path(gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError, InputError):  # in use, or removed by another run
            found = folder.lstat()
            mine = found.st_uid == os.getuid() and folder.is_dir() and not folder.is_symlink()
            if mine and time.time() - found.st_mtime > YOUNG:
                with locked(folder, patience=0.0):
                    shutil.rmtree(folder, ignore_errors=True)
