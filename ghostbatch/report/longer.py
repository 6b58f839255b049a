"""Figures of the title's claim: what a longer first phase, at the high rate, does to the end."""

from collections.abc import Sequence
from statistics import mean, stdev

import altair as alt
import numpy as np

from ghostbatch.diagnostics import find_plateau
from ghostbatch.errors import InputError
from ghostbatch.report.charts import Plot, axis, layered, markers, rounded
from ghostbatch.report.drawing import Data
from ghostbatch.report.entries import Gap, paired_gap, show_gap
from ghostbatch.report.growth import first_phase_end
from ghostbatch.report.runs import Group, Run
from ghostbatch.report.table import Table

WHO = (("column", "column", ""), ("run", "run", ""))
BEFORE, AFTER = "end of the first phase", "end of training"


def accuracy_by_distance(groups: list[Group], _curves: Data) -> Plot | None:
    """Plot final accuracy against final distance; fit the effect of doubling the first phase."""
    groups = _with_drops(groups, "accuracy-by-distance")
    data: Data = {name: [] for name in ("column", "run", "distance", "accuracy", *_ENDS)}
    lengths, ends = [], []
    for group in groups:
        distances = [*group.ends("distance").values()]
        accuracies = [*group.ends("accuracy").values()]
        lengths += [float(np.log2(group.runs[0].plan.drop_updates[0]))] * len(accuracies)
        ends += accuracies
        _add_points(data, group, distances, accuracies)

    names = [group.column for group in groups]

    def layers(base: alt.Chart) -> list[alt.Chart]:
        means = base.transform_filter("datum.distance_low != null").mark_rule(strokeWidth=1.5)
        return [
            means.encode(x="distance_low:Q", x2="distance_high:Q"),
            means.encode(y="accuracy_low:Q", y2="accuracy_high:Q"),
            markers(base, "column", names, 45).transform_filter("datum.distance_low == null"),
            markers(base, "column", names, 90, True).transform_filter("datum.distance_low != null"),
        ]

    chart = layered(
        "column",
        names,
        axis("distance", "distance from the initial weights at the end"),
        axis("accuracy", "accuracy % at the end"),
        [*WHO, ("distance", "distance", ".4~g"), ("accuracy", "accuracy %", ".2f")],
        layers,
    )
    caption = (
        "Accuracy at the end against the distance of the weights from their initial values. The "
        "columns differ in the length of the first phase, at the high learning rate; the later "
        "phases are the same. Hollow points are seeds; filled ones are means, with lines of ± one "
        "standard deviation."
    )
    return Plot(
        *("accuracy-by-distance", "Train longer", caption, chart, data),
        fits=_doubling(np.array(lengths), np.array(ends)),
    )


_ENDS = ("distance_low", "distance_high", "accuracy_low", "accuracy_high")


def _add_points(
    data: Data, group: Group, distances: Sequence[float], accuracies: Sequence[float]
) -> None:
    """Add each seed, and the mean with its bars if there are several."""
    labels = [f"seed {run.seed}" for run in group.finished]
    lines = [(d, a, None, None, None, None) for d, a in zip(distances, accuracies, strict=True)]
    points: list[tuple[str, tuple[float | None, ...]]] = list(zip(labels, lines, strict=True))
    if len(lines) > 1:
        bars = [(mean(v) - stdev(v), mean(v) + stdev(v)) for v in (distances, accuracies)]
        middle = (mean(distances), mean(accuracies), *bars[0], *bars[1])
        points.append((f"mean of {len(lines)} seeds", middle))
    for label, values in points:
        data["column"].append(group.column)
        data["run"].append(label)
        for name, value in zip(("distance", "accuracy", *_ENDS), values, strict=True):
            data[name].append(value if value is None else rounded([value])[0])


def _doubling(lengths: np.ndarray, ends: np.ndarray) -> Table | None:
    if len(set(lengths.tolist())) < 2:
        return None
    slope, (low, high) = slope_with_interval(lengths, ends)
    line = ("doubling the first phase", f"{slope:+.2f} points", f"[{low:+.2f}, {high:+.2f}]")
    return Table(("", "accuracy", "95 % bootstrap interval"), [line])


def gain_at_drop(groups: list[Group], _curves: Data) -> Plot | None:
    """Plot accuracy at the end, and before the first drop, against the length of the first phase.

    The table says how flat validation was before the drop: the slope over the last half of the
    first phase, and the gain from there to the end, each with an interval over seeds.
    """
    groups = _with_drops(groups, "gain-at-drop")
    data: Data = {name: [] for name in ("column", "run", "when", "length", "accuracy")}
    lines = []
    for group in groups:
        length, plan = first_phase_end(group), group.runs[0].plan
        epoch = plan.samples / plan.recipe.batch
        curves = {run.seed: _validation(run, epoch) for run in group.finished}
        before = {
            seed: [v for t, v in zip(*curve, strict=True) if t <= length / epoch][-1]
            for seed, curve in curves.items()
            if curve[0] and curve[0][0] <= length / epoch
        }
        ends = group.ends("accuracy")
        for when, values in ((BEFORE, before), (AFTER, ends)):
            data["when"] += [when] * len(values)
            data["column"] += [group.column] * len(values)
            data["run"] += [f"seed {seed}" for seed in values]
            data["length"] += [length] * len(values)
            data["accuracy"] += rounded(values.values())
        try:
            found = find_plateau(list(curves.values()), drop=length / epoch)
            slope = show_gap(Gap(found.slope, found.slope_interval, len(curves)))
        except InputError:  # too few evaluations before the drop
            slope = "–"
        lines.append((group.column, f"{length:,}", slope, show_gap(paired_gap(ends, before))))

    def layers(base: alt.Chart) -> list[alt.Chart]:
        means = base.encode(y="mean(accuracy):Q")
        return [means.mark_line(strokeWidth=2), markers(base, "when", [BEFORE, AFTER])]

    chart = layered(
        "when",
        [BEFORE, AFTER],
        axis("length", "updates of the first phase", log=True, values=sorted({*data["length"]})),
        axis("accuracy", "validation accuracy %"),
        [
            *WHO,
            ("when", "when", ""),
            ("length", "updates", ",d"),
            ("accuracy", "accuracy %", ".2f"),
        ],
        layers,
    )
    caption = (
        "Validation accuracy at the last evaluation before the first drop of the learning rate, "
        "and at the end, against the length of the first phase. Each seed is a point; lines are "
        "means. The slope is that of validation accuracy over the last half of the first phase, in "
        "points per epoch; intervals are Student's at 95 %, of the gain over seeds."
    )
    table = Table(("", "first phase", "slope before the drop", "gain to the end"), lines)
    return Plot("gain-at-drop", "The gain at the drop", caption, chart, data, fits=table)


def _validation(run: Run, epoch: float) -> tuple[list[float], list[float]]:
    """Return the times of a run's evaluations in epochs of so many updates, and accuracies."""
    found = [r for r in run.records.shown if r.split == "validation"]
    return [r.update / epoch for r in found], [r.accuracy for r in found]


def _with_drops(groups: list[Group], kind: str) -> list[Group]:
    """Return the columns with finished runs; refuse one without a drop of the rate."""
    finished = [group for group in groups if group.finished]
    for group in finished:
        if not group.runs[0].plan.drop_updates:
            problem = f"{kind} needs a drop of the rate, and {group.column} has none"
            raise InputError("figures", problem, "leave this figure out of the row")
    return finished


def slope_with_interval(
    x: np.ndarray, y: np.ndarray, resamples: int = 2000
) -> tuple[float, tuple[float, float]]:
    """Return the slope of a line through points, and its 95 % bootstrap interval over points.

    >>> slope, (low, high) = slope_with_interval(np.arange(9.0), 2 * np.arange(9.0))
    >>> round(slope, 6), round(low, 6), round(high, 6)
    (2.0, 2.0, 2.0)
    """
    chosen = np.random.default_rng(0).integers(0, len(x), (resamples, len(x)))
    chosen = np.concatenate([np.arange(len(x))[None], chosen])
    across = x[chosen] - x[chosen].mean(1, keepdims=True)
    squares = (across**2).sum(1)
    slopes = (across * y[chosen]).sum(1)[squares > 0] / squares[squares > 0]
    low, high = np.quantile(slopes[1:], [0.025, 0.975])
    return float(slopes[0]), (float(low), float(high))
