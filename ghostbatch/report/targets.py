"""When runs reach a target accuracy: updates against the batch size, and time beside the first."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import floor
from statistics import mean
from typing import Any, NamedTuple

import altair as alt

from ghostbatch.report.charts import Plot, axis, layered, markers, rounded, ticks
from ghostbatch.report.drawing import Data
from ghostbatch.report.runs import Group, Results, Run
from ghostbatch.report.table import Table, show_spread
from ghostbatch.train import Record

BELOW = 10
"""Points of accuracy below the target that the figure of time shows; lower ones are at its edge."""

Layers = Callable[[alt.Chart], Sequence[alt.Chart]]


class Reached(NamedTuple):
    """What a run had done at an evaluation."""

    updates: int
    images: int
    seconds: float
    """The run's seconds times the share of its updates: evaluations are spread evenly."""


def reached(group: Group, target: float) -> list[Reached | None]:
    """Return what each ended run had done at its first evaluation at or above ``target`` percent.

    None is a run that never was there, or that diverged.
    """
    return [
        next((_at(run, r.update) for r in _validated(run) if r.accuracy >= target), None)
        if run.status == "finished"
        else None
        for run in group.runs
        if run.summary
    ]


def _validated(run: Run) -> list[Record]:
    """Return the evaluations of a run after its first update."""
    return [r for r in run.records.shown if r.split == "validation" and r.update > 0]


def _at(run: Run, update: int) -> Reached:
    seconds = run.summary.seconds / run.summary.updates if run.summary else 0.0
    return Reached(update, update * run.plan.recipe.batch, update * seconds)


def time_to_accuracy(groups: list[Group], _curves: Data) -> Plot | None:
    """Plot accuracy against time; the table says when each column reaches the first one's mean."""
    groups = [group for group in groups if group.finished]
    if not groups:
        return None
    first = groups[0].column
    target = mean(groups[0].ends("accuracy").values())
    data: Data = {name: [] for name in ("column", "seconds", "images", "accuracy", "target")}
    for group in groups:
        _add_curve(data, group, target if group is groups[0] else None)
    names = [group.column for group in groups]
    chart = layered(
        *("column", names, axis("seconds", "seconds, about", log=True)),
        axis("accuracy", "validation accuracy %", low=max(0, floor(target - BELOW))),
        [("column", "column", ""), *_TIME, ("accuracy", "accuracy %", ".2f")],
        _curves_and_target(names),
    )
    caption = (
        "Validation accuracy against time: means over seeds. The dashed line is the mean accuracy "
        f"of {first} after its last update, {target:.2f} %. The table has updates, images and "
        "seconds to the first evaluation at or above it, of the seeds that reach it. Seconds are "
        "those of the run times the share of its updates that were done, so the time of "
        "evaluations is spread evenly; runs that shared a device took longer than alone."
    )
    table = Table(
        ("", f"seeds that reach {target:.2f} %", "updates", "images", "seconds, about"),
        [_time_line(group, target) for group in groups],
    )
    return Plot("time-to-accuracy", f"Time to the accuracy of {first}", caption, chart, data, table)


_TIME = (("seconds", "seconds", ",.1f"), ("images", "images", ".4~s"))


def _curves_and_target(names: Sequence[str]) -> Layers:
    def layers(base: alt.Chart) -> list[alt.Chart]:
        dashed = base.mark_line(strokeDash=[5, 4], strokeWidth=1.4, stroke="currentColor")
        return [
            base.mark_line(strokeJoin="round", strokeWidth=2),
            markers(base, "column", names, 25),
            dashed.encode(y="target:Q").transform_filter("datum.target != null"),
        ]

    return layers


def _add_curve(data: Data, group: Group, target: float | None) -> None:
    """Add the mean accuracy and the mean time of a column at each evaluation, and the target."""
    seeds = [{r.update: r.accuracy for r in _validated(run)} for run in group.finished]
    updates = sorted(set.intersection(*map(set, seeds)))
    for update in updates:
        when = [_at(run, update) for run in group.finished]
        data["images"].append(when[0].images)
        data["seconds"] += rounded([mean(each.seconds for each in when)])
        data["accuracy"] += rounded([mean(seed[update] for seed in seeds)])
    data["column"] += [group.column] * len(updates)
    data["target"] += [target] * len(updates)


def _time_line(group: Group, target: float) -> tuple[str, ...]:
    ends = reached(group, target)
    found = [each for each in ends if each]
    count = f"{len(found)} of {len(ends)}"
    if not found:
        return (group.column, count, "–", "–", "–")
    updates, images, seconds = zip(*found, strict=True)
    spreads = (show_spread(updates, 0), show_spread(images, 0), show_spread(seconds, 1))
    return (group.column, count, *spreads)


@dataclass(frozen=True)
class Point:
    """The fewest updates to a target at a batch size, of the rows whose seeds all reach it."""

    norm: str
    batch: int
    target: float
    row: str
    updates: list[float]
    """By seed."""

    @property
    def series(self) -> str:
        """What the legend calls it."""
        return f"{self.norm}, {self.target:g} %"


def target_figures(results: Results) -> list[Plot]:
    """Return the figure of updates to each target of the study against the batch size, if any."""
    targets = results.study.targets
    points = _points(results)
    if not targets or not points:
        return []
    data: Data = {
        "series": [point.series for point in points],
        "batch": [point.batch for point in points],
        "updates": rounded(mean(point.updates) for point in points),
        "perfect": rounded(_perfect(point, points) for point in points),
        "row": [point.row for point in points],
    }
    caption = (
        "Updates to the first evaluation at or above each target accuracy, against the batch size: "
        "means over seeds. Of the rows, which differ in the length of the runs, the one with the "
        "fewest updates counts among those in which every seed reaches the target. Dashed "
        "lines are perfect scaling from the smallest batch of each curve: twice the batch, half "
        "the updates. The table has the factor to it in brackets, which is also that of images."
    )
    title, chart, table = "Updates to a target accuracy", _scaling(data), _table(results, points)
    return [Plot("updates-to-target", title, caption, chart, data, table)]


def _scaling(data: Data) -> dict[str, Any]:
    names = list(dict.fromkeys(data["series"]))
    both = [*data["updates"], *data["perfect"]]

    def layers(base: alt.Chart) -> list[alt.Chart]:
        dashed = base.mark_line(strokeDash=[5, 4], strokeWidth=1, opacity=0.8)
        return [
            base.mark_line(strokeWidth=2),
            markers(base, "series", names),
            dashed.encode(y="perfect:Q"),
        ]

    return layered(
        *("series", names),
        axis("batch", "batch", log=True, values=sorted({*data["batch"]})),
        axis("updates", "updates to the target", log=True, values=ticks(min(both), max(both))),
        [
            *(("series", "series", ""), ("batch", "batch", ",d"), ("row", "row", "")),
            *(("updates", "updates", ",.0f"), ("perfect", "perfect scaling", ",.0f")),
        ],
        layers,
    )


def _norm(group: Group) -> str:
    ghost = group.runs[0].plan.recipe.ghost
    return "plain norm" if ghost is None else "ghosts"


def _points(results: Results) -> list[Point]:
    """Return the points that are reached, by norm, target and batch."""
    best: dict[tuple[str, float, int], Point] = {}
    for row, groups in results.rows.items():
        for group in (group for group in groups if group.finished):
            batch = group.runs[0].plan.recipe.batch
            for target in results.study.targets:
                ends = reached(group, target)
                updates = [float(each.updates) for each in ends if each]
                if len(updates) < len(ends):
                    continue
                point = Point(_norm(group), batch, target, row, updates)
                key = (point.norm, target, batch)
                if key not in best or mean(updates) < mean(best[key].updates):
                    best[key] = point
    return [best[key] for key in sorted(best, key=lambda key: (key[0] != "plain norm", *key[1:]))]


def _perfect(point: Point, points: Sequence[Point]) -> float:
    """Return the updates of perfect scaling from the smallest batch of the same curve."""
    start = min((p for p in points if p.series == point.series), key=lambda p: p.batch)
    return mean(start.updates) * start.batch / point.batch


def _table(results: Results, points: Sequence[Point]) -> Table:
    """Return a line for each norm and batch, with the updates to each target."""
    targets = results.study.targets
    found = {(point.norm, point.batch, point.target): point for point in points}
    groups = [g for groups in results.rows.values() for g in groups if g.finished]
    places = {(_norm(group), group.runs[0].plan.recipe.batch) for group in groups}
    lines = []
    for norm, batch in sorted(places, key=lambda place: (place[0] != "plain norm", place[1])):
        texts = []
        for target in targets:
            point = found.get((norm, batch, target))
            if point is None:
                texts.append("not reached")
                continue
            factor = mean(point.updates) / _perfect(point, points)
            texts.append(f"{show_spread(point.updates, 0)} ({factor:.2f} x; {point.row})")
        lines.append((norm, f"{batch:,}", *texts))
    return Table(("", "batch", *(f"{target:g} %" for target in targets)), lines)
