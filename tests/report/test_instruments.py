"""The figures of instruments, and the page of a study without runs."""

import json
import re

import numpy as np
import pytest

from ghostbatch.errors import InputError
from ghostbatch.report.figures import slope_with_interval
from ghostbatch.report.instruments import draw_instruments
from ghostbatch.report.page import write_report
from ghostbatch.report.runs import read_results
from ghostbatch.study import Instrument, Study
from ghostbatch.study.manifest import write_study

POTENTIAL = {"walked": 15.0, "images": 1000, "model": "f1", "data": "digits"}


def walks(times):
    return {
        kind: {"times": times.tolist(), "distances": d.tolist(), "stderrs": [0.01] * len(times)}
        for kind, d in (("brownian", np.log(times) ** 2), ("flat", np.sqrt(times)))
    }


@pytest.mark.parametrize("listed", [True, False], ids=["study.json", "no-study.json"])
def test_a_study_of_instruments_has_a_page_without_runs(tmp_path, listed):
    (tmp_path / "walk.json").write_text(json.dumps(walks(np.unique(np.geomspace(1, 1e4, 60) // 1))))
    if listed:
        instruments = (Instrument("walk"), Instrument("potential"))
        write_study(Study("walk", instruments=instruments), tmp_path)
    page, tables = write_report(tmp_path)
    assert tables == []
    text = page.read_text()
    assert "brownian: p = 2.00 in [2.00, 2.00], neither log t nor sqrt t: (ln t)^p fits" in text
    assert re.search(r"flat: .* ordinary: sqrt t fits better than log t by \d+ of AIC", text)
    assert "<h2>Recipes</h2>" not in text
    assert (tmp_path / "figures" / "walk.png").stat().st_size > 10_000


def test_the_caption_of_the_potential_states_its_exponents_at_several_radii(tmp_path):
    """The field has alpha = 1, and a trend that raises alpha where it is not removed."""
    draw = np.random.default_rng(0)
    z = draw.uniform(0, 25, 2000)
    losses = 2.3 + 0.1 * z + 0.2 * np.sqrt(z) * draw.normal(size=2000)
    found = {"distances": z.tolist(), "losses": losses.tolist(), "origin": 2.3, "radius": 25.0}
    (tmp_path / "potential.json").write_text(json.dumps({**found, **POTENTIAL}))
    (plot,) = draw_instruments(read_results(tmp_path), tmp_path)
    rows = re.findall(r"([\d.]+) ± [\d.]+ and ([\d.]+) ± [\d.]+ up to ([\d.]*\d)", plot.caption)
    assert [radius for *_, radius in rows] == ["3", "10", "20", "25"]
    assert [float(rest) for _, rest, _ in rows] == pytest.approx([1, 1, 1, 1], abs=0.25)
    assert float(rows[-1][0]) > 1.3
    assert "loss of f1 from" in plot.caption
    assert "1,000 training images of digits" in plot.caption


def test_the_caption_of_separable_data_sets_every_draw_beside_its_limit(tmp_path):
    """One draw follows its limit; the near-support vector of the other has a weight of 1e-3."""
    t = np.geomspace(10, 1e30, 30)
    draw = {"times": t.tolist(), "distances": (2 * np.log(t)).tolist(), "length": 2.0}
    draws = [{**draw, "gaps": (each / np.log(t)).tolist()} for each in (0.25, 0.5)]
    draws = [{**draws[0], "limit": 0.25, "slack": 1.0}, {**draws[1], "limit": 0.3, "slack": 0.1}]
    (tmp_path / "separable.json").write_text(json.dumps({"draws": draws}))
    _, plot = draw_instruments(read_results(tmp_path), tmp_path)
    assert "0.2500, 0.2500 and 0.2500 (1e-30); 0.3000, 0.5000 and 0.5000 (1e-03)." in plot.caption


@pytest.mark.parametrize("text", ["{", "[]", "{}"])
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
    (tmp_path / "walk.json").write_text(json.dumps(walks(np.unique(np.geomspace(1, 1e4, 60) // 1))))
    (tmp_path / "separable.json").write_text("{")
    with pytest.warns(UserWarning, match=r"separable.json cannot be read; delete it, and run"):
        page, _ = write_report(tmp_path)
    assert "brownian: p = 2.00" in page.read_text()
