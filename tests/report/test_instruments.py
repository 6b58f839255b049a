"""The figures of instruments, and the page of a study without runs."""

import io
import json
import re

import numpy as np
import pytest
from rich.console import Console

from ghostbatch.cli.report import print_report
from ghostbatch.errors import InputError
from ghostbatch.report.instruments import instrument_figures
from ghostbatch.report.longer import slope_with_interval
from ghostbatch.report.page import write_report
from ghostbatch.report.runs import Results, read_results
from ghostbatch.study import Instrument, Row, Study, find_recipe
from ghostbatch.study.manifest import write_study

POTENTIAL = {"walked": 15.0, "images": 1000, "model": "f1", "data": "digits", "init": "network"}


def write_walks(folder):
    """Write walk.json: a walk that is log(t) ** 2 exactly, and one that is sqrt(t)."""
    t = np.unique(np.geomspace(1, 1e4, 60) // 1)
    walks = {
        kind: {"times": t.tolist(), "distances": d.tolist(), "stderrs": [0.01] * len(t)}
        for kind, d in (("brownian", np.log(t) ** 2), ("flat", np.sqrt(t)))
    }
    (folder / "walk.json").write_text(json.dumps(walks))


@pytest.mark.parametrize("listed", [True, False], ids=["study.json", "no-study.json"])
def test_a_study_of_instruments_has_a_page_without_runs(tmp_path, listed):
    write_walks(tmp_path)
    if listed:
        instruments = (Instrument("walk"), Instrument("potential"))
        write_study(Study("walk", instruments=instruments), tmp_path)
    page, (table,) = write_report(tmp_path)
    assert [line[0] for line in table.lines] == ["brownian", "flat"]
    text = page.read_text()
    assert re.search(r"<td>brownian</td><td>2.00</td><td>\[2.00, 2.00\]</td><td>neither", text)
    assert re.search(r"<td>flat</td>.*<td>ordinary: sqrt t fits better than log t by \d+", text)
    assert "<details>" not in text
    assert not (tmp_path / "records.csv").exists()


def test_the_potential_has_a_panel_per_number_of_bins_and_a_table_of_exponents(tmp_path):
    draw = np.random.default_rng(0)
    z = draw.uniform(0, 20, 400)
    losses = 2.3 + 0.1 * z * draw.normal(size=400)  # alpha = 2
    found = {"distances": z.tolist(), "losses": losses.tolist(), "origin": 2.3, "radius": 20.0}
    (tmp_path / "potential.json").write_text(json.dumps({**found, **POTENTIAL}))
    (plot,) = instrument_figures(read_results(tmp_path), tmp_path)
    radii, alphas, _ = zip(*plot.fits.lines, strict=True)
    assert radii == ("3", "10", "20")
    assert float(alphas[-1].split(" ± ")[0]) == pytest.approx(2, abs=0.2)
    assert set(plot.data["bins"]) == {"10 bins", "20 bins", "50 bins"}  # a panel each
    assert plot.chart["facet"]["field"] == "bins"
    assert "loss of f1 from" in plot.caption
    assert "1,000 training images of digits" in plot.caption


EMPTY = '{"draws": [{"times": [], "gaps": [], "distances": [], "length": 1}]}'


@pytest.mark.parametrize("text", ["{", "[]", "{}", EMPTY])
def test_a_damaged_file_is_refused_by_name(tmp_path, text):
    (tmp_path / "separable.json").write_text(text)
    with pytest.raises(InputError, match=r"^folder: .*separable.json cannot be read; delete it"):
        write_report(tmp_path)


def test_the_interval_of_a_slope_covers_it():
    draw = np.random.default_rng(1)
    x = np.repeat(np.arange(5.0), 3)
    covered = 0
    for _ in range(100):
        slope, (low, high) = slope_with_interval(x, 0.5 * x + draw.normal(size=15), 400)
        covered += low < 0.5 < high
        assert low < slope < high
    assert 80 <= covered <= 99  # of 95: a bootstrap over 15 points is a little narrow


def test_a_damaged_file_is_named_and_the_other_instruments_are_shown(tmp_path):
    write_walks(tmp_path)
    (tmp_path / "separable.json").write_text("{")
    with pytest.warns(UserWarning, match=r"separable.json cannot be read; delete it, and run"):
        page, _ = write_report(tmp_path)
    assert "<td>brownian</td><td>2.00</td>" in page.read_text()


def test_separable_data_have_a_curve_and_a_line_for_each_draw(tmp_path):
    t = np.geomspace(10, 1e20, 30)
    draw = {"times": t.tolist(), "distances": (2 * np.log(t)).tolist()}
    draw |= {"gaps": (0.25 / np.log(t)).tolist(), "length": 2.0, "limit": 0.25, "slack": 0.1}
    (tmp_path / "separable.json").write_text(json.dumps({"draws": [draw] * 3}))
    length, gap = instrument_figures(read_results(tmp_path), tmp_path)
    assert len(set(length.data["draw"])) == len(gap.fits.lines) == 3
    assert length.data["length"][:30] == pytest.approx(np.log(t).tolist(), rel=1e-4)
    assert set(gap.data["product"]) == {0.25}
    assert gap.fits.lines[0] == ("draw 0", "0.2500", "0.2500", "0.2500", "1e-02")


def test_sharpness_has_a_table_of_columns_in_the_studys_order_and_a_point_for_each_run(tmp_path):
    values = {"SB": (2.0, 4.0), "+GBN": (8.0,), "+RA": (-0.001,)}
    runs = {
        f"row/{column}/seed-{seed}": {
            "eigenvalue": {"value": value},
            "relative": {"value": 10 * value},
            "rate": 0.5,
            "images": 1000,
        }
        for column in sorted(values)
        for seed, value in enumerate(values[column])
    }
    (tmp_path / "sharpness.json").write_text(json.dumps({"runs": runs}))
    recipes = dict.fromkeys(("SB", "LB", "+GBN", "+RA"), find_recipe("f1-digits"))
    study = Study("mine", {"row": Row(recipes)}, instruments=(Instrument("sharpness"),))
    (plot,) = instrument_figures(Results(study, {}, {}), tmp_path)
    measures = ("largest eigenvalue", "relative eigenvalue", "rate x eigenvalue")
    assert plot.fits.headers == ("", *measures, "seeds")
    assert plot.fits.lines == [
        ("SB", "3.00 ± 1.41", "30.0 ± 14.1", "1.50 ± 0.71", "2"),
        ("+GBN", "8.00", "80.0", "4.00", "1"),
        ("+RA", "-0.00100", "-0.0100", "-0.000500", "1"),
    ]
    assert plot.data["relative"] == [20.0, 40.0, 80.0, -0.01]
    page, (table,) = write_report(tmp_path)
    assert sorted(table.lines) == sorted(plot.fits.lines)
    assert "<td>3.00 ± 1.41</td>" in page.read_text()
    assert "1,000 training images" in page.read_text()


def test_the_terminal_shows_the_tables_of_instruments(tmp_path):
    write_walks(tmp_path)
    console = Console(file=io.StringIO(), width=80)
    print_report(tmp_path, console)
    shown = console.file.getvalue()
    assert "exponent p" in shown
    assert re.search(r"brownian +2.00 +\[2.00, 2.00\]", shown)
