"""Signals to a command before it does anything."""

import os
import signal
import subprocess
import sys
import time

import pytest

LINES = {
    signal.SIGINT: "interrupted",
    signal.SIGTERM: "terminated",
    signal.SIGHUP: "stopped by SIGHUP",
    signal.SIGUSR1: "stopped by SIGUSR1",
}

SLOW_TORCH = """
import pathlib, time
pathlib.Path("importing").touch()
try:
    time.sleep(30)
except BaseException:  # as some libraries do
    raise ImportError("a half of torch is missing")
"""


def start(folder, *launcher):
    """Start a command whose import of torch takes long, and wait until it imports it."""
    (folder / "torch.py").write_text(SLOW_TORCH)
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    process = subprocess.Popen(
        [*launcher, sys.executable, "-m", "ghostbatch", "train", "f1-digits"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )
    deadline = time.monotonic() + 20
    while not (folder / "importing").exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return process


@pytest.mark.parametrize("how", LINES, ids=lambda how: how.name)
def test_a_signal_while_torch_is_imported_is_one_line_and_its_exit_code(tmp_path, how):
    process = start(tmp_path)
    process.send_signal(how)
    out, err = process.communicate(timeout=20)
    assert err == f"ghostbatch: {LINES[how]}; run the same command again to continue\n"
    assert out == ""
    assert process.returncode == 128 + how


def test_a_command_under_nohup_outlives_its_terminal(tmp_path):
    process = start(tmp_path, "nohup")
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGTERM)  # is handled after the other
    assert process.wait(20) == 128 + signal.SIGTERM
    process.communicate()
