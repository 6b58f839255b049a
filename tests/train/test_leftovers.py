"""What a refused or killed run leaves behind: nothing, or what the next run removes."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ghostbatch import train
from ghostbatch.errors import InputError
from ghostbatch.files import locked
from ghostbatch.train import temporary


def test_a_refused_run_leaves_neither_a_folder_nor_a_lock(folder_recipe, tmp_path):
    """The images are read when the folder is locked already."""
    for path in Path(folder_recipe.data.removeprefix("folder:")).rglob("*.png"):
        path.write_bytes(b"")
    before = sorted(tmp_path.iterdir())
    with pytest.raises(InputError, match=r"^data: no image of .* can be read"):
        train(folder_recipe, out=tmp_path / "runs" / "mine")
    assert sorted(tmp_path.iterdir()) == before
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"^data: no image of .* can be read"):
        train(folder_recipe, out=tmp_path / "empty")
    assert not list((tmp_path / "empty").iterdir())


KILLED = """
import os, signal, sys
import ghostbatch as gb
from small_networks import narrow

def kill(record):
    os.kill(os.getpid(), signal.SIGKILL)

recipe = gb.Recipe(model="python:small_networks:narrow", data="digits", batch=64, base_batch=64,
                   regime=gb.Regime(lr=0.1, epochs=1))
gb.train(recipe, device="cpu", on_record=kill)
"""


def test_the_temporary_folder_of_a_killed_run_is_removed_by_the_next(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    killed = subprocess.run([sys.executable, "-c", KILLED], check=False, capture_output=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    (left,) = tmp_path.iterdir()
    train(tiny)
    assert list(tmp_path.iterdir()) == [left], "it may be of a run that is about to lock it"
    used, other = Path(f"{left}-used"), tmp_path / "ghostbatch-notes"
    shutil.copytree(left, used)
    other.mkdir()
    long_ago = time.time() - 2 * temporary.YOUNG
    for folder in (left, used, other):
        os.utime(folder, (long_ago, long_ago))
    with locked(used):
        os.utime(used, (long_ago, long_ago))
        train(tiny)
        assert sorted(tmp_path.iterdir()) == sorted([used, other])
