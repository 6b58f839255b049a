"""The entries of a study's table: each cell's spread over seeds, the paper's figure, and its gap.

The gap is to the first column of the row. Runs with the same seed are paired: they have the same
initial weights and data order, so the interval is Student's for the mean of their differences.
"""

from dataclasses import dataclass
from math import sqrt
from statistics import mean, stdev

from ghostbatch.diagnostics.plateau import student_quantile
from ghostbatch.recipe import Recipe
from ghostbatch.report.runs import Group, Results


@dataclass(frozen=True)
class Gap:
    """Mean difference of paired runs, in points of accuracy."""

    mean: float
    interval: tuple[float, float] | None
    """At 95 %; None for a single pair."""
    pairs: int


@dataclass(frozen=True)
class Entry:
    """One column of a row of the study: what its runs say together."""

    column: str
    recipe: Recipe
    group: Group
    """It has no runs if none has begun."""
    accuracies: dict[int, float]
    """In percent at the last update, by seed, of the finished runs."""
    recalibrated: dict[int, float]
    """The same with recalibrated running statistics, of the runs that have it."""
    averaged: dict[int, float]
    """The same of the averaged weights, of the runs that average them (`Recipe.ema`)."""
    paper: float | None
    gap: Gap | None
    """To the first column of the row; None for that column itself."""
    averaged_gap: Gap | None
    """The same from the averaged weights to the first column's own weights at its last update."""
    marks: tuple[str, ...]
    """What to know before trusting the entry."""

    @property
    def difference(self) -> float | None:
        """The mean accuracy minus the paper's."""
        if self.paper is None or not self.accuracies:
            return None
        return mean(self.accuracies.values()) - self.paper


def entries_of(results: Results) -> dict[str, list[Entry]]:
    """Return the entries of every row, also of declared columns without runs."""
    rows: dict[str, list[Entry]] = {}
    names = dict.fromkeys([*results.rows, *(row for row, _ in results.missing)])
    declared = [name for name in results.study.rows if name in names]
    for row in declared or names:
        groups = {group.column: group for group in results.rows.get(row, [])}
        columns = results.study.rows[row].columns if declared else groups
        for column in columns:
            if column in groups or (row, column) in results.missing:
                rows.setdefault(row, []).append(_entry(results, row, column, groups))
    return rows


def _entry(results: Results, row: str, column: str, groups: dict[str, Group]) -> Entry:
    declared = results.study.rows.get(row)
    group = groups.get(column, Group(column, []))
    recipe = declared.columns[column] if declared else group.runs[0].plan.recipe
    base: dict[int, float] = {}
    if declared and (first := next(iter(declared.columns))) in groups and first != column:
        base = groups[first].ends("accuracy")
    accuracies, averaged = group.ends("accuracy"), group.ends("ema_accuracy")
    return Entry(
        column=column,
        recipe=group.runs[0].plan.recipe if group.runs else recipe,
        group=group,
        accuracies=accuracies,
        recalibrated=group.ends("recalibrated_accuracy"),
        averaged=averaged,
        paper=declared.paper.get(column) if declared else None,
        gap=paired_gap(accuracies, base),
        averaged_gap=paired_gap(averaged, base),
        marks=tuple(_marks(results, row, group, recipe)),
    )


def _marks(results: Results, row: str, group: Group, recipe: Recipe) -> list[str]:
    """Say in words what is missing or unusual about a cell."""
    missing = results.missing.get((row, group.column), [])
    marks = [f"missing: seed {', '.join(map(str, missing))}"] if missing else []
    marks += [f"{count} {status}" for status, count in group.unfinished.items()]
    if len(group.finished) == 1:
        marks.append("single seed")
    if results.study.scale != 1:
        marks.append(f"scaled: epochs × {results.study.scale:g}")
    if recipe.holdout:
        marks.append(f"on {recipe.holdout:,} held-out training images")
    return marks


def paired_gap(values: dict[int, float], base: dict[int, float]) -> Gap | None:
    """Return the mean difference to ``base`` over the seeds that both have.

    >>> gap = paired_gap({0: 90.0, 1: 92.0, 5: 80.0}, {0: 91.0, 1: 92.0, 2: 99.0})
    >>> gap.mean, round(gap.interval[0], 3), round(gap.interval[1], 3), gap.pairs
    (-0.5, -6.853, 5.853, 2)
    """
    differences = [values[seed] - base[seed] for seed in values if seed in base]
    if not differences:
        return None
    middle, interval = mean(differences), None
    if (n := len(differences)) > 1:
        reach = student_quantile(n - 1) * stdev(differences) / sqrt(n)
        interval = (middle - reach, middle + reach)
    return Gap(middle, interval, n)


def show_gap(gap: Gap | None) -> str:
    """Return a gap with its interval as text.

    >>> show_gap(Gap(-0.5, (-1.0, 0.0), 3)), show_gap(Gap(0.25, None, 1)), show_gap(None)
    ('-0.50 [-1.00, +0.00]', '+0.25', '')
    """
    if gap is None:
        return ""
    interval = gap.interval and f" [{gap.interval[0]:+.2f}, {gap.interval[1]:+.2f}]"
    return f"{gap.mean:+.2f}" + (interval or "")
