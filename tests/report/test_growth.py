"""Fits of weight distance: log-spaced records, one window for all columns, errors over seeds."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ghostbatch import Regime
from ghostbatch.diagnostics import log_spaced
from ghostbatch.report.growth import fit_growth
from ghostbatch.report.records import RunRecords
from ghostbatch.report.runs import Group, Run, read_results
from ghostbatch.study import find_recipe
from ghostbatch.train import Record, Summary, train

REGIME = Regime(lr=0.05, epochs=4, drops=((2, 0.005), (3, 0.0005)))
RECIPE = replace(find_recipe("f1-digits"), regime=REGIME)
SUMMARY = Summary(
    status="finished", accuracy=1.0, loss=1.0, updates=1, epochs=1.0, distance=1.0, seconds=1.0
)


def group(column, law, *, batch=32, seeds=3):
    """Return runs whose distance at update t is ``law(t, seed)``."""
    plan = replace(RECIPE, batch=batch).plan(4000)
    fields = {"epoch": 1.0, "split": "train", "loss": 1.0, "accuracy": 1.0, "lr": 0.05}
    runs = []
    for seed in range(seeds):
        times = log_spaced(plan.updates)
        records = [Record(update=t, distance=float(law(t, seed)), **fields) for t in times]
        runs.append(Run(Path(), plan, {}, RunRecords(records, records), SUMMARY))
    return Group(column, runs)


def logarithmic(t, seed):
    return 1 + (2 + 0.1 * seed) * np.log(t) + 0.01 * np.cos(7 * t)


def test_errors_are_deviations_over_seeds():
    (fit,) = fit_growth([group("SB", logarithmic)])
    assert fit.slopes == pytest.approx((2.0, 2.1, 2.2), abs=0.01)
    assert fit.exponents == pytest.approx((1, 1, 1), abs=0.02)
    assert fit.slope == "2.10 ± 0.10"
    assert fit.mean.finding.startswith("ultra-slow: log t fits")


def test_all_columns_are_fitted_up_to_the_first_drop_of_any():
    groups = [group("SB", logarithmic), group("LB", logarithmic, batch=128)]
    assert [each.runs[0].plan.drop_updates[0] for each in groups] == [250, 63]
    for fit, alone in zip(fit_growth(groups), (224, 63), strict=True):
        assert fit.window == (1, 63)
        assert fit.mean.samples == len([t for t in log_spaced(1000) if t <= 63])
        (single,) = fit_growth([g for g in groups if g.column == fit.column])
        assert single.window == (1, alone)


def test_a_law_that_is_undecided_is_not_called_better():
    draw = np.random.default_rng(0)
    noisy = group("SB", lambda t, _: np.log(t) + 2 * draw.normal(), batch=256)
    (fit,) = fit_growth([noisy])
    assert fit.mean.finding.startswith("undecided")
    assert "fits better" not in fit.mean.finding


def test_the_number_of_evaluations_does_not_move_a_fit(tiny, tmp_path):
    recipe, fits = replace(tiny, regime=replace(tiny.regime, drops=())), []
    for evaluations in (1, 16):
        train(recipe, out=tmp_path / str(evaluations) / "run", evaluations=evaluations)
        ((groups,),) = [read_results(tmp_path / str(evaluations)).rows.values()]
        fits += fit_growth(groups)
    assert fits[0].mean == fits[1].mean
    assert fits[0].slopes == fits[1].slopes


def test_a_run_that_has_lost_its_records_is_not_fitted():
    lost = group("LB", logarithmic, batch=64)
    recipe = replace(RECIPE, batch=64, hold="distance", reference="elsewhere")
    runs = [replace(r, plan=recipe.plan(4000), records=RunRecords([], [])) for r in lost.runs]
    assert fit_growth([group("SB", logarithmic), replace(lost, runs=runs)]) == []


def test_a_phase_of_few_updates_is_not_fitted():
    groups = [group("SB", logarithmic), group("LB", logarithmic, batch=2048)]
    assert fit_growth(groups) == []
