"""The examples run, and show what they claim."""

import re
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(name):
    return subprocess.run(
        [sys.executable, "-W", "error", EXAMPLES / name], capture_output=True, text=True, check=True
    ).stdout


def test_ghost_norm_in_your_model_converts_and_converts_back():
    lines = run("ghost_norm_in_your_model.py").splitlines()
    assert ["Ghost" in line for line in lines] == [False, True, False]


def test_large_batch_in_your_loop_closes_the_gap():
    small, large, adapted = map(
        float, re.findall(r"([\d.]+) %", run("large_batch_in_your_loop.py"))
    )
    assert large < small - 5
    assert adapted > small - 1
