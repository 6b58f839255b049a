"""What the scripts make from the files of results is current."""

import json
import re
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def _scripts(monkeypatch):
    """Let the scripts be imported by their names."""
    monkeypatch.syspath_prepend(ROOT / "scripts")


def test_the_page_of_results_its_figures_and_the_readmes_table_are_current():
    made = import_module("results").pages()
    assert len(made) > 3
    for path, text in made.items():
        assert path.read_text() == text, f"{path.name}: run scripts/results.py write"


def test_the_figures_and_the_table_of_the_guides_are_current():
    made = import_module("figures").files()
    assert len(made) == 4
    for path, text in made.items():
        assert path.read_text() == text, f"{path.name}: run scripts/figures.py"


def test_a_gain_is_the_difference_that_the_table_of_results_shows():
    readme = (ROOT / "README.md").read_text()
    (line,) = re.findall(r"^\| \*\*C1, CIFAR-10\*\* .*$", readme, re.MULTILINE)
    _, before, after, *_ = [float(value) for value in re.findall(r"(\d+\.\d+)", line)][::2]
    (shown,) = [line for line in import_module("figures").changes() if line.startswith("| rate")]
    gain = float(shown.split(" | ")[2].split()[0])
    assert gain == pytest.approx(after - before, abs=0.011)  # of rounded means


def test_a_published_curve_ends_with_the_published_accuracy():
    files = list((ROOT / "results").rglob("seed-*.json"))
    assert files
    for path in files:
        result = json.loads(path.read_text())
        last = dict(zip(result["fields"], result["validation"][-1], strict=True))
        assert last["update"] == result["summary"]["updates"]
        assert abs(last["accuracy"] - result["summary"]["accuracy"]) < 1e-4
