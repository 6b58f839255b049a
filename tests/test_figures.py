"""The figures and the table that scripts/figures.py makes are current."""

import re
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[1] / "scripts"


@pytest.fixture
def script(monkeypatch):
    """Return the module scripts/figures.py."""
    monkeypatch.syspath_prepend(SCRIPTS)  # it imports another script
    spec = spec_from_file_location("figures", SCRIPTS / "figures.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_figures_and_the_table_of_the_guides_are_current(script):
    made = script.files()
    assert len(made) == 4
    for path, text in made.items():
        assert path.read_text() == text, f"{path.name}: run scripts/figures.py"


def test_a_gain_is_the_difference_that_the_table_of_results_shows(script):
    readme = (SCRIPTS.parent / "README.md").read_text()
    (line,) = re.findall(r"^\| \*\*C1, CIFAR-10\*\* .*$", readme, re.MULTILINE)
    _, before, after, *_ = [float(value) for value in re.findall(r"(\d+\.\d+)", line)][::2]
    (shown,) = [line for line in script.changes() if line.startswith("| rate")]
    gain = float(shown.split(" | ")[2].split()[0])
    assert gain == pytest.approx(after - before, abs=0.011)  # of rounded means
