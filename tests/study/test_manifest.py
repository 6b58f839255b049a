"""study.json says what a study's folder holds."""

import json
from contextlib import contextmanager
from dataclasses import replace

import pytest
from fake_executor import FakeExecutor

from ghostbatch.errors import InputError
from ghostbatch.study import Study, Where, find_study, read_study, run_study
from ghostbatch.study.manifest import held_part, write_study


def describe(study, columns=None, seeds=None, earlier=None):
    return held_part(study, study.cells(columns, seeds), earlier)


def run(study, cells, out, on_event=lambda *_: None):
    """Run cells with a fake executor."""
    options = {"on_event": on_event, "where": Where(device="cpu")}
    run_study(study, cells, out, jobs=1, make_executor=lambda _lock: FakeExecutor(), **options)


def test_it_lists_columns_in_the_order_of_the_study():
    manifest = describe(find_study("quick"), ["+GBN", "SB"], [1, 0])
    assert manifest.name == "quick"
    assert list(manifest.rows["f1-digits"].columns) == ["SB", "+GBN"]
    assert manifest.seeds == (0, 1)


def test_it_lists_figures_and_instruments():
    manifest = describe(find_study("diffusion"))
    assert list(manifest.rows) == list(find_study("diffusion").rows)
    assert "accuracy-by-distance" in manifest.rows["longer"].figures
    assert "accuracy-by-distance" not in manifest.rows["before"].figures
    assert [instrument.name for instrument in manifest.instruments] == ["potential"]


def test_rows_without_a_chosen_column_are_not_listed():
    assert list(describe(find_study("diffusion"), ["noise"]).rows) == ["rate or noise"]


def test_another_run_of_the_study_adds_its_columns_and_seeds():
    study = find_study("quick")
    first = describe(study, ["+GBN"], [2])
    both = describe(study, ["SB"], [0], first)
    assert list(both.rows["f1-digits"].columns) == ["SB", "+GBN"]
    assert both.seeds == (0, 2)
    assert describe(study, ["SB"], [0], both) == both


def test_what_is_written_is_read_back(tmp_path):
    manifest = describe(find_study("diffusion"))
    write_study(manifest, tmp_path)
    assert read_study(tmp_path) == manifest
    assert read_study(tmp_path / "elsewhere") is None


def test_it_is_written_before_the_first_run(tmp_path):
    study = find_study("quick")
    seen = []
    cells = study.cells(["SB"], [0])
    run(study, cells, tmp_path, lambda *_: seen.append(read_study(tmp_path)))
    assert seen[0] == held_part(study, cells, None)


def test_what_another_command_adds_before_the_lock_is_kept(tmp_path, monkeypatch):
    study = find_study("quick")
    cells = study.cells(["SB"], [0])

    @contextmanager
    def late_lock(folder):
        """Let another command run and end first."""
        write_study(describe(study, ["LB"], [1]), folder)
        yield 0

    monkeypatch.setattr("ghostbatch.study.runner.locked", late_lock)
    run(study, cells, tmp_path)
    assert read_study(tmp_path) == describe(study, ["SB"], [0], describe(study, ["LB"], [1]))


def test_the_folder_of_another_study_is_refused_and_left_alone(tmp_path):
    write_study(replace(find_study("quick"), name="other"), tmp_path)
    before = (tmp_path / "study.json").read_bytes()
    with pytest.raises(InputError, match=r"^out: the folder holds the study other; choose"):
        run(Study("small"), [], tmp_path)
    assert (tmp_path / "study.json").read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("text", ["{", "[]", "{}", json.dumps({"rows": [], "name": "x"})])
def test_a_damaged_file_is_refused_by_name(tmp_path, text):
    (tmp_path / "study.json").write_text(text)
    with pytest.raises(InputError, match=r"^folder: .*study.json cannot be read; delete it"):
        read_study(tmp_path)


def test_figures_that_a_study_declares_now_replace_the_earlier_ones():
    study = find_study("quick")
    row = replace(study.rows["f1-digits"], figures=("distance",))
    changed = replace(study, rows={"f1-digits": row})
    manifest = describe(changed, ["SB"], [0], describe(study, ["SB"], [0]))
    assert manifest.rows["f1-digits"].figures == ("distance",)
