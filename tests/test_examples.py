"""The examples run, and show what they claim."""

import os
import re
import subprocess
import sys
from pathlib import Path

import ghostbatch as gb

EXAMPLES = Path(__file__).parent.parent / "examples"
LOOP = "large_batch_in_your_loop.py"


def run(name):
    command = [sys.executable, "-W", "error", EXAMPLES / name]
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}  # tests run in parallel processes
    done = subprocess.run(command, env=one_thread, capture_output=True, text=True, check=True)
    return done.stdout


def before(text):
    """Return the script that the comments of an adapted one tell of."""
    text = re.sub(r"# was: (.*)\n.*", r"\1", text)
    text = re.sub(r"# gone: ", "", text)
    return re.sub(r".*  # new\n", "", text)


def accuracy(printed):
    return float(re.search(r"accuracy ([\d.]+) %", printed)[1])


def test_ghost_norm_in_your_model_converts_and_converts_back():
    lines = run("ghost_norm_in_your_model.py").splitlines()
    assert ["Ghost" in line for line in lines] == [False, True, False]


def test_the_marked_lines_are_all_that_an_ordinary_script_needs_to_close_the_gap(capsys):
    ordinary = before((EXAMPLES / LOOP).read_text())
    # Its data come from the package; an ordinary script would have its own.
    assert set(re.findall(r"gb\.\w+", ordinary)) == {"gb.data"}
    found = {}
    for batch in (64, 512):
        script = ordinary.replace("BATCH = 64", f"BATCH = {batch}")
        exec(compile(script, LOOP, "exec"), {"__name__": "__main__", "gb": gb})  # noqa: S102 (ours)
        found[batch] = accuracy(capsys.readouterr().out)
    assert found[512] < found[64] - 5
    assert accuracy(run(LOOP)) > found[64] - 2
