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


def test_the_page_of_results_is_current():
    assert (ROOT / "docs" / "results.md").read_text() == load_script().page()


def test_a_published_curve_ends_with_the_published_accuracy():
    files = list((ROOT / "results" / "table1").rglob("seed-*.json"))
    assert files
    for path in files:
        result = json.loads(path.read_text())
        last = dict(zip(result["fields"], result["validation"][-1], strict=True))
        assert last["update"] == result["summary"]["updates"]
        assert abs(last["accuracy"] - result["summary"]["accuracy"]) < 1e-4
