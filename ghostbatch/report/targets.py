"""When runs reach a target accuracy: updates against the batch size, and time beside the first."""

from dataclasses import dataclass
from math import floor
from statistics import mean
from typing import NamedTuple

import altair as alt

from ghostbatch.report.charts import Plot, axis, dashed, data_of, layered, markers, ticks, tips
from ghostbatch.report.drawing import Data
from ghostbatch.report.runs import Group, Results, Run
from ghostbatch.report.table import Table, show_spread
from ghostbatch.train import Record

BELOW = 10
"""Points of accuracy below the target that the figure of time shows; lower ones are at its edge."""


class Reached(NamedTuple):
    """What a run had done at an evaluation."""

    updates: int
    images: int
    seconds: float
    """The run's seconds times the share of its images: evaluations are spread evenly."""


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
    images, ended = run.plan.images, run.summary
    share = images(update) / images(ended.updates) if ended else 0.0
    return Reached(update, images(update), ended.seconds * share if ended else 0.0)


def time_to_accuracy(groups: list[Group], _curves: Data) -> Plot | None:
    """Plot accuracy against time; the table says when each column reaches the first one's mean."""
    groups = [group for group in groups if group.finished]
    if not groups:
        return None
    first = groups[0].column
    target = mean(groups[0].ends("accuracy").values())
    rows: list[tuple[object, ...]] = []
    for group in groups:
        seeds = [{r.update: r.accuracy for r in _validated(run)} for run in group.finished]
        for update in sorted(set.intersection(*map(set, seeds))):
            when = [_at(run, update) for run in group.finished]
            seconds, accuracy = mean(w.seconds for w in when), mean(seed[update] for seed in seeds)
            shown = target if group is groups[0] else None
            rows.append((group.column, float(seconds), when[0].images, float(accuracy), shown))
    data = data_of(("column", "seconds", "images", "accuracy", "target"), rows)
    names = [group.column for group in groups]

    def layers(base: alt.Chart) -> list[alt.Chart]:
        return [
            base.mark_line(strokeJoin="round", strokeWidth=2),
            markers(base, "column", names, 25),
            dashed(base).encode(y="target:Q").transform_filter("datum.target != null"),
        ]

    chart = layered(
        "column",
        names,
        axis("seconds", "seconds, about", log=True),
        axis("accuracy", "validation accuracy %", low=max(0, floor(target - BELOW))),
        tips("column", "seconds", "images", "accuracy"),
        layers,
    )
    caption = (
        "Validation accuracy against time: means over seeds. The dashed line is the mean accuracy "
        f"of {first} after its last update, {target:.2f} %. The table has updates, images and "
        "seconds to the first evaluation at or above it, of the seeds that reach it. Seconds are "
        "those of the run times the share of its images that were done, so the time of "
        "evaluations is spread evenly; runs that shared a device took longer than alone."
    )
    table = Table(
        ("", f"seeds that reach {target:.2f} %", "updates", "images", "seconds, about"),
        [_time_line(group, target) for group in groups],
    )
    return Plot("time-to-accuracy", f"Time to the accuracy of {first}", caption, chart, data, table)


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

    series: str
    """Norm and target, as the legend calls them."""
    batch: int
    row: str
    updates: list[float]
    """By seed."""
    perfect: float
    """Updates of perfect scaling from the smallest batch of the series."""


Key = tuple[bool, float, int]
"""Whether there are ghosts, the target, and the batch."""

NORMS = ("plain norm", "ghosts")


def target_figures(results: Results) -> list[Plot]:
    """Return the figure of updates to each target of the study against the batch size, if any."""
    found = _points(results)
    if not found:
        return []
    points = list(found.values())
    rows = [(p.series, p.batch, float(mean(p.updates)), p.perfect, p.row) for p in points]
    data = data_of(("series", "batch", "updates", "perfect", "row"), rows)
    names = list(dict.fromkeys(data["series"]))
    both = [*data["updates"], *data["perfect"]]

    def layers(base: alt.Chart) -> list[alt.Chart]:
        perfect = base.mark_line(strokeDash=[5, 4], strokeWidth=1, opacity=0.8)
        return [
            base.mark_line(strokeWidth=2),
            markers(base, "series", names),
            perfect.encode(y="perfect:Q"),
        ]

    chart = layered(
        "series",
        names,
        axis("batch", "batch", log=True, values=sorted({*data["batch"]})),
        axis("updates", "updates to the target", log=True, values=ticks(min(both), max(both))),
        tips("series", "batch", "row", "updates", "perfect"),
        layers,
    )
    caption = (
        "Updates to the first evaluation at or above each target accuracy, against the batch size: "
        "means over seeds. Of the rows, which differ in the length of the runs, the one with the "
        "fewest updates counts among those in which every seed reaches the target. Dashed "
        "lines are perfect scaling from the smallest batch of each curve: twice the batch, half "
        "the updates. The table has the factor to it in brackets, which is also that of images."
    )
    title, table = "Updates to a target accuracy", _table(results, found)
    return [Plot("updates-to-target", title, caption, chart, data, table)]


def _place(group: Group) -> tuple[bool, int]:
    """Return whether a column has ghosts, and its batch."""
    recipe = group.runs[0].plan.recipe
    return recipe.ghost is not None, recipe.batch


def _points(results: Results) -> dict[Key, Point]:
    """Return the points that are reached, by norm, target and batch in order."""
    best: dict[Key, tuple[str, list[float]]] = {}
    for row, groups in results.rows.items():
        for group in (group for group in groups if group.finished):
            ghosts, batch = _place(group)
            for target in results.study.targets:
                ends = reached(group, target)
                updates = [float(each.updates) for each in ends if each]
                key = (ghosts, target, batch)
                if len(updates) == len(ends) and (
                    key not in best or mean(updates) < mean(best[key][1])
                ):
                    best[key] = (row, updates)
    points: dict[Key, Point] = {}
    images: dict[str, float] = {}  # those of the smallest batch of each series
    for (ghosts, target, batch), (row, updates) in sorted(best.items()):
        series = f"{NORMS[ghosts]}, {target:g} %"
        images.setdefault(series, mean(updates) * batch)
        point = Point(series, batch, row, updates, perfect=images[series] / batch)
        points[ghosts, target, batch] = point
    return points


def _table(results: Results, points: dict[Key, Point]) -> Table:
    """Return a line for each norm and batch, with the updates to each target."""
    targets = results.study.targets
    places = {_place(g) for groups in results.rows.values() for g in groups if g.finished}
    lines = []
    for ghosts, batch in sorted(places):
        found = [points.get((ghosts, target, batch)) for target in targets]
        texts = (_show_point(point) if point else "not reached" for point in found)
        lines.append((NORMS[ghosts], f"{batch:,}", *texts))
    return Table(("", "batch", *(f"{target:g} %" for target in targets)), lines)


def _show_point(point: Point) -> str:
    factor = mean(point.updates) / point.perfect
    return f"{show_spread(point.updates, 0)} ({factor:.2f} x; {point.row})"
