"""The page of results is what the files of results say."""

import json
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

ROOT = Path(__file__).parents[1]


def load_script():
    spec = spec_from_file_location("results", ROOT / "scripts" / "results.py")
    script = module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


def test_the_page_its_figures_and_the_readmes_table_are_current():
    made = load_script().pages()
    assert len(made) > 3
    for path, text in made.items():
        assert path.read_text() == text, path.name


def test_a_published_curve_ends_with_the_published_accuracy():
    files = list((ROOT / "results").rglob("seed-*.json"))
    assert files
    for path in files:
        result = json.loads(path.read_text())
        last = dict(zip(result["fields"], result["validation"][-1], strict=True))
        assert last["update"] == result["summary"]["updates"]
        assert abs(last["accuracy"] - result["summary"]["accuracy"]) < 1e-4
