"""How the C kernels are compiled, kept and loaded."""

import os
import stat
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from norm_inputs import draw
from torch.testing import assert_close

from ghostbatch.ops import ghost_batch_norm, ghost_batch_norm_reference
from ghostbatch.ops.backends import select
from ghostbatch.ops.backends.c import build

pytestmark = pytest.mark.usefixtures("compiler")
BUILD = Path(__file__).with_name("build_kernels.py")


@pytest.fixture
def fresh(tmp_path, monkeypatch):
    """Start with an empty cache; return the list of commands that the compiler is run with."""
    asked = []
    run = subprocess.run

    def counted(command, **options):
        asked.append(command)
        return run(command, **options)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(select, "_broken", set())
    monkeypatch.setattr(build.subprocess, "run", counted)
    tmp_path.chmod(0o700)
    build.library.cache_clear()
    yield asked
    build.library.cache_clear()


def test_a_library_is_compiled_once_and_kept(fresh, tmp_path):
    assert build.library(torch.float64) is not None
    assert len(fresh) == 2  # compiled and linked
    assert len(list((tmp_path / "ghostbatch").iterdir())) == 1
    build.library.cache_clear()
    assert build.library(torch.float64) is not None
    assert len(fresh) == 2


def test_a_kept_library_that_was_cut_short_is_compiled_again(fresh, tmp_path):
    subprocess.run([sys.executable, BUILD], check=True)
    (kept,) = (tmp_path / "ghostbatch").iterdir()
    whole = kept.read_bytes()
    kept.write_bytes(whole[:1000])  # as a crash may leave it
    fresh.clear()
    assert build.library(torch.float64) is not None
    assert len(fresh) == 2
    assert [path.name for path in kept.parent.iterdir()] == [kept.name]
    assert len(kept.read_bytes()) == len(whole)


@pytest.mark.parametrize("obstacle", ["a file", "no rights"])
def test_without_a_cache_it_is_compiled_for_this_process(fresh, tmp_path, obstacle, monkeypatch):
    if obstacle == "a file":
        (tmp_path / "ghostbatch").write_text("")
    else:
        (tmp_path / "ghostbatch").mkdir()
        access = os.access  # root may write anywhere
        monkeypatch.setattr(os, "access", lambda at, how: how != os.W_OK and access(at, how))
    assert build.library(torch.float64) is not None
    assert len(fresh) == 2
    assert not list(tmp_path.rglob("*.so"))


@pytest.mark.parametrize("named", [None, "/nonexistent"])
def test_without_a_compiler_tensor_code_is_used_and_one_line_of_the_log_says_so(
    fresh, monkeypatch, caplog, named
):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    if named:
        monkeypatch.setenv("CC", named)
    caplog.set_level("INFO", "ghostbatch")
    build._log_no_compiler.cache_clear()
    x = draw(8, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not select.has_kernels(x)
        assert_close(ghost_batch_norm(x, ghost=4), ghost_batch_norm_reference(x, ghost=4))
        assert not select.has_kernels(x.float())
    assert not fresh
    assert [record.getMessage() for record in caplog.records] == [
        "no C compiler ($CC, cc, gcc or clang) is found, so slower tensor code is used"
    ]


def test_a_compiler_that_fails_is_named_once_and_tensor_code_is_used(fresh, tmp_path, monkeypatch):
    broken = tmp_path / "cc"
    broken.write_text("#!/bin/sh\necho 'cc: out of order' >&2\nexit 1\n")
    broken.chmod(broken.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CC", str(broken))
    x = draw(8, 3)
    with pytest.warns(UserWarning, match=r"tensor code .* cc: out of order$"):
        y = ghost_batch_norm(x, ghost=4)
    again = ghost_batch_norm(x, ghost=4)  # another warning would be an error
    assert_close([y, again], [ghost_batch_norm_reference(x, ghost=4)] * 2)
    assert len(fresh) == 1


def test_several_processes_may_build_at_once(fresh, tmp_path):
    del fresh
    processes = [subprocess.Popen([sys.executable, "-W", "error", BUILD]) for _ in range(3)]
    assert [process.wait() for process in processes] == [0, 0, 0]
    assert len(list((tmp_path / "ghostbatch").iterdir())) == 1


def test_another_compiler_option_source_or_cpu_is_another_library(tmp_path, monkeypatch):
    cc = tmp_path / "cc"
    cc.write_text("one")
    keys = [build._key((str(cc),), ("-O3",)), build._key((str(cc),), ("-O2",))]
    keys.append(build._key((str(cc), "-m32"), ("-O3",)))
    assert build._key((str(cc),), ("-O3",)) == keys[0]
    cc.write_text("another")
    keys.append(build._key((str(cc),), ("-O3",)))
    source = tmp_path / "source.c"
    source.write_text("")
    monkeypatch.setattr(build, "SOURCE", source)
    keys.append(build._key((str(cc),), ("-O3",)))
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("model name: other\nflags: sse\n\n")
    monkeypatch.setattr(build, "CPU", cpuinfo)
    keys.append(build._key((str(cc),), ("-O3",)))
    assert len(set(keys)) == len(keys)


def test_the_compiler_may_be_named_with_options(fresh, monkeypatch):
    monkeypatch.setenv("CC", "cc -g0")
    assert build.library(torch.float64) is not None
    assert [command[1] for command in fresh] == ["-g0", "-g0"]
