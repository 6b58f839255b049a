"""The examples run, and show what they claim."""

import re
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parent.parent / "examples"
LOOP = "large_batch_in_your_loop.py"


def run(script):
    return subprocess.run(
        [sys.executable, "-W", "error", script], capture_output=True, text=True, check=True
    ).stdout


def before(text):
    """Return the script that the comments of an adapted one tell of."""
    text = re.sub(r"# was: (.*)\n.*", r"\1", text)
    text = re.sub(r"# gone: ", "", text)
    return re.sub(r".*  # new\n", "", text)


def accuracy(text, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(text)
    return float(re.search(r"accuracy ([\d.]+) %", run(script))[1])


def test_ghost_norm_in_your_model_converts_and_converts_back():
    lines = run(EXAMPLES / "ghost_norm_in_your_model.py").splitlines()
    assert ["Ghost" in line for line in lines] == [False, True, False]


def test_the_marked_lines_are_all_that_an_ordinary_script_needs_to_close_the_gap(tmp_path):
    adapted = (EXAMPLES / LOOP).read_text()
    # Its data come from the package; an ordinary script would have its own.
    ordinary = before(adapted).replace("\nEPOCHS", "\nimport ghostbatch as gb\n\nEPOCHS")
    assert set(re.findall(r"gb\.\w+", ordinary)) == {"gb.data"}
    small = accuracy(ordinary, tmp_path)
    large = accuracy(ordinary.replace("BATCH = 64", "BATCH = 512"), tmp_path)
    assert large < small - 5
    assert accuracy(adapted, tmp_path) > small - 2
