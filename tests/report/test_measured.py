"""Figures of noise scale and sharpness: only where runs measured them."""

from dataclasses import replace

import pytest
from finished_runs import add_measured, write_study_folder

from ghostbatch.report import charts
from ghostbatch.report.figures import row_figures
from ghostbatch.report.measured import noise_scale, sharpness
from ghostbatch.report.runs import read_results
from ghostbatch.study import Row, Study


@pytest.fixture
def folder(tiny, tmp_path):
    """Return a study of two columns, of which the second was measured."""
    columns = {"SB": tiny, "LB": replace(tiny, batch=128)}
    write_study_folder(Study("two", {"row": Row(columns)}, seeds=(0, 1)), tmp_path)
    for metrics in tmp_path.glob("row/LB/*/metrics.jsonl"):
        add_measured(metrics)
    return tmp_path


def plots(folder):
    return {plot.name: plot for plot in row_figures(read_results(folder))}


def test_a_run_that_measured_them_has_both_figures_with_its_own_values(folder):
    found = plots(folder)
    noise, sharp = found["noise-scale"].data, found["sharpness"].data
    assert set(noise["column"]) == set(sharp["column"]) == {"LB"}
    assert noise["noise"] == [100 + update for update in noise["update"]]
    assert noise["high"] == [None if u > 4 else 200 + u for u in noise["update"]]
    assert sharp["product"] == pytest.approx([8 * rate for rate in sharp["lr"]])
    assert set(sharp["edge"]) == {3.8}


def test_their_declarations_are_valid_vega_lite(folder, monkeypatch):
    checked = []
    monkeypatch.setattr(
        charts, "declared", lambda chart: checked.append(chart.to_dict(validate=True)) or {}
    )
    groups = read_results(folder).rows["row"]
    assert noise_scale(groups, {})
    assert sharpness(groups, {})
    assert len(checked) == 2


def test_runs_that_measured_nothing_have_neither(folder):
    for path in folder.glob("row/LB"):
        path.rename(folder / "elsewhere")
    assert not {"noise-scale", "sharpness"} & plots(folder).keys()
