"""Figures of the title's claim: what a longer first phase, at the high rate, does to the end."""

from statistics import mean, stdev

import altair as alt
import numpy as np

from ghostbatch.diagnostics import find_plateau
from ghostbatch.errors import InputError
from ghostbatch.report.charts import Plot, axis, data_of, layered, markers, tips
from ghostbatch.report.drawing import Data
from ghostbatch.report.entries import Gap, paired_gap, show_gap
from ghostbatch.report.growth import first_phase_end
from ghostbatch.report.runs import Group
from ghostbatch.report.table import Table

BEFORE, AFTER = "end of the first phase", "end of training"


def accuracy_by_distance(groups: list[Group], _curves: Data) -> Plot | None:
    """Plot final accuracy against final distance; fit the effect of doubling the first phase."""
    groups = _with_drops(groups, "accuracy-by-distance")
    rows: list[tuple[object, ...]] = []
    lengths: list[float] = []
    ends: list[float] = []
    for group in groups:
        distances, accuracies = group.ends("distance"), group.ends("accuracy")
        lengths += [float(np.log2(group.runs[0].plan.drop_updates[0]))] * len(accuracies)
        ends += accuracies.values()
        for seed, accuracy in accuracies.items():
            rows.append((group.column, f"seed {seed}", distances[seed], accuracy, *[None] * 4))
        if len(accuracies) > 1:
            x, y = (_with_bar(list(found.values())) for found in (distances, accuracies))
            label = f"mean of {len(accuracies)} seeds"
            rows.append((group.column, label, x[0], y[0], *x[1:], *y[1:]))
    ranges = ("distance_low", "distance_high", "accuracy_low", "accuracy_high")
    data = data_of(("column", "run", "distance", "accuracy", *ranges), rows)
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
        tips("column", "run", "distance", "accuracy"),
        layers,
    )
    caption = (
        "Accuracy at the end against the distance of the weights from their initial values. The "
        "columns differ in the length of the first phase, at the high learning rate; the later "
        "phases are the same. Hollow points are seeds; filled ones are means, with lines of ± one "
        "standard deviation."
    )
    table = _doubling(np.array(lengths), np.array(ends))
    return Plot("accuracy-by-distance", "Train longer", caption, chart, data, table)


def _with_bar(values: list[float]) -> tuple[float, float, float]:
    """Return the mean, and the mean minus and plus one standard deviation."""
    middle, deviation = mean(values), stdev(values)
    return middle, middle - deviation, middle + deviation


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
    rows: list[tuple[object, ...]] = []
    lines = []
    for group in groups:
        length, plan = first_phase_end(group), group.runs[0].plan
        curves, before = [], {}
        for run in group.finished:
            records = [r for r in run.records.shown if r.split == "validation"]
            curves.append(([r.epoch for r in records], [r.accuracy for r in records]))
            if early := [r.accuracy for r in records if r.update <= length]:
                before[run.seed] = early[-1]
        ends = group.ends("accuracy")
        for when, values in ((BEFORE, before), (AFTER, ends)):
            for seed, accuracy in values.items():
                rows.append((group.column, f"seed {seed}", when, length, accuracy))
        try:
            found = find_plateau(curves, drop=plan.epoch(length))
            slope = show_gap(Gap(found.slope, found.slope_interval, len(curves)))
        except InputError:  # too few evaluations before the drop
            slope = "–"
        lines.append((group.column, f"{length:,}", slope, show_gap(paired_gap(ends, before))))
    data = data_of(("column", "run", "when", "length", "accuracy"), rows)

    def layers(base: alt.Chart) -> list[alt.Chart]:
        means = base.encode(y="mean(accuracy):Q")
        return [means.mark_line(strokeWidth=2), markers(base, "when", [BEFORE, AFTER])]

    chart = layered(
        "when",
        [BEFORE, AFTER],
        axis("length", "updates of the first phase", log=True, values=sorted({*data["length"]})),
        axis("accuracy", "validation accuracy %"),
        [*tips("column", "run", "when"), ("length", "updates", ",d"), *tips("accuracy")],
        layers,
    )
    caption = (
        "Validation accuracy at the last evaluation before the first drop of the learning rate, "
        "and at the end, against the length of the first phase. Each seed is a point; lines are "
        "means. The slope is that of validation accuracy over the last half of the first phase, in "
        "points per epoch; intervals are Student's at 95 %, of the gain over seeds."
    )
    table = Table(("", "first phase", "slope before the drop", "gain to the end"), lines)
    return Plot("gain-at-drop", "The gain at the drop", caption, chart, data, table)


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
