"""Which compiled libraries are loaded: those that nobody else can have put there."""

import ctypes
import hashlib
import logging
import os
import stat
import subprocess
import tempfile
import time
from pathlib import Path

import pytest
import torch

from ghostbatch.ops.backends.c import build, cache

pytestmark = pytest.mark.usefixtures("compiler")
PLANTED = """
#include <stdio.h>
__attribute__((constructor)) static void run(void) { fclose(fopen("MARK", "w")); }
"""


@pytest.fixture
def fresh(tmp_path, monkeypatch):
    """Start with no cache and a source that compiles at once; return the folder of all caches."""
    source, root, temporary = (tmp_path / name for name in ("own.c", "root", "temporary"))
    # Another source for each test: a process loads a library of one name only once.
    source.write_text(f"int own(void) {{ return 1; }} /* {tmp_path} */")
    root.mkdir(0o700)
    temporary.mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(root))
    monkeypatch.setattr(build, "SOURCE", source)
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    build.library.cache_clear()
    yield root
    build.library.cache_clear()


def load() -> ctypes.CDLL:
    build.library.cache_clear()
    return build.library(torch.float64)


def plant(folder: Path) -> Path:
    """Put a valid library where ours would be; return the file that it writes when it is loaded."""
    mark, source = folder.parent / "mark", folder.parent / "planted.c"
    source.write_text(PLANTED.replace("MARK", str(mark)))
    options = (*build.COMPILE, *build.TYPES[torch.float64])
    path = folder / f"norm-{build._key(build.find_compiler(), options)}.so"
    subprocess.run(["cc", "-shared", "-fPIC", source, "-o", path], check=True)
    path.write_bytes(path.read_bytes() + hashlib.sha256(path.read_bytes()).digest())
    path.chmod(0o700)
    return mark


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_folder_and_library_are_for_this_user_alone_whatever_the_umask(fresh):
    before = os.umask(0)
    try:
        load()
    finally:
        os.umask(before)
    (library,) = (fresh / "ghostbatch").iterdir()
    assert [mode(library.parent), mode(library)] == [0o700, 0o700]


def test_a_planted_library_would_run(fresh):
    """Without this the next tests would show nothing."""
    folder = fresh / "ghostbatch"
    folder.mkdir(0o700)
    mark = plant(folder)
    load()
    assert mark.exists()


@pytest.mark.parametrize("loose", [0o770, 0o777, 0o1777], ids=oct)
def test_a_folder_that_others_can_write_is_closed_and_its_libraries_are_removed(fresh, loose):
    folder = fresh / "ghostbatch"
    folder.mkdir()
    mark = plant(folder)
    folder.chmod(loose)
    assert load().own() == 1
    assert not mark.exists()
    assert mode(folder) == 0o700
    kept = next(folder.iterdir()).stat().st_mtime_ns
    assert load().own() == 1
    assert next(folder.iterdir()).stat().st_mtime_ns == kept


@pytest.mark.parametrize("loose", ["group", "others", "symbolic link", "owner"])
def test_a_library_that_others_can_write_is_compiled_again(fresh, loose, monkeypatch):
    folder = fresh / "ghostbatch"
    folder.mkdir(0o700)
    mark = plant(folder)
    (path,) = folder.iterdir()
    if loose == "symbolic link":
        path.rename(fresh / "elsewhere.so").chmod(0o700)
        path.symlink_to(fresh / "elsewhere.so")
    elif loose == "owner":
        fstat = os.fstat

        def of_somebody_else(descriptor):
            seen = list(fstat(descriptor))
            seen[stat.ST_UID] += stat.S_ISREG(seen[stat.ST_MODE])
            return os.stat_result(seen)

        monkeypatch.setattr(cache.os, "fstat", of_somebody_else)
    else:
        path.chmod(0o720 if loose == "group" else 0o702)
    assert load().own() == 1
    assert not mark.exists()
    assert not path.is_symlink()


@pytest.mark.parametrize(
    "why", ["others can write to the folder above", "another owner", "a symbolic link"]
)
def test_a_folder_that_cannot_be_trusted_is_left_alone(fresh, why, monkeypatch, caplog):
    folder = fresh / "ghostbatch"
    folder.mkdir(0o700)
    mark = plant(folder)
    if why == "another owner":
        monkeypatch.setattr(cache.os, "geteuid", lambda: os.getuid() + 1)
    elif why == "a symbolic link":
        folder.rename(fresh / "elsewhere")
        folder.symlink_to(fresh / "elsewhere")
    else:
        fresh.chmod(0o770)
    before = [path.stat().st_mtime_ns for path in folder.iterdir()]
    caplog.set_level(logging.INFO, "ghostbatch")
    assert load().own() == 1
    assert not mark.exists()
    assert [path.stat().st_mtime_ns for path in folder.iterdir()] == before
    assert not list(Path(tempfile.gettempdir()).iterdir())
    (record,) = caplog.records
    assert record.getMessage().startswith("compiling the CPU kernels for this process alone: ")


def test_the_sticky_bit_protects_a_folder_among_those_of_others(fresh):
    fresh.chmod(0o1777)
    load()
    assert len(list((fresh / "ghostbatch").iterdir())) == 1


def test_compiling_is_logged_once_and_loading_is_not(fresh, caplog):
    del fresh
    caplog.set_level(logging.INFO, "ghostbatch")
    load()
    load()
    assert caplog.record_tuples == [
        (
            "ghostbatch",
            logging.INFO,
            "compiling the CPU kernels; this happens once per machine and takes a few seconds",
        )
    ]


@pytest.mark.parametrize("where", ["cache", "temporary folder"])
def test_the_next_compilation_removes_what_killed_ones_left_an_hour_ago(fresh, where):
    if where == "cache":
        folder, name = fresh / "ghostbatch", "build-abc"
        folder.mkdir(0o700)
    else:
        folder, name = Path(tempfile.gettempdir()), "ghostbatch-kernels-abc"
        fresh.chmod(0o777)
    for each in (name, "somebody-else", f"{name}-now"):
        (folder / each).mkdir()
        (folder / each / "norm.o").touch()
        if not each.endswith("-now"):
            os.utime(folder / each, times=(0, time.time() - 3700))
    load()
    left = {path.name for path in folder.iterdir() if path.is_dir()}
    assert left == {"somebody-else", f"{name}-now"}
