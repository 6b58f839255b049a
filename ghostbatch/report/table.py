"""The tables of a study as text, for the terminal and the page."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, stdev

from ghostbatch.optim import update_at
from ghostbatch.recipe import Plan
from ghostbatch.report.runs import Group, Results

HEADERS = (
    *("", "accuracy %", "recal. %", "seeds", "batch", "ghosts", "updates", "epochs", "distance"),
    "s / run",
)
RECALIBRATED = "recal. %: accuracy with running statistics that are averages over the training set"


@dataclass(frozen=True)
class Table:
    """One row of a study as a table, with one line per column of the study; or other figures."""

    title: str
    lines: Sequence[tuple[str, ...]]
    notes: list[str]
    headers: tuple[str, ...] = HEADERS


def table_of(row: str, groups: list[Group], unreadable: Sequence[str] = ()) -> Table:
    """Return the table of a row of the study; its notes end with the ``unreadable`` runs."""
    notes = [
        f"{group.column}: {count} of {len(group.runs)} {status}"
        for group in groups
        for status in ("diverged", "not finished")
        if (count := sum(run.status == status for run in group.runs))
    ]
    notes += [
        f"{group.column}: accuracy on {held:,} held-out training images, not on the test set"
        for group in groups
        if (held := group.runs[0].plan.recipe.holdout)
    ]
    notes += [
        f"{group.column}: {show_spread(averaged)} % with averaged weights"
        for group in groups
        if (averaged := group.over_seeds(lambda s: s.ema_accuracy))
    ]
    if any(group.over_seeds(lambda s: s.recalibrated_accuracy) for group in groups):
        notes.append(RECALIBRATED)
    return Table(row, [_line(group) for group in groups], [*notes, *unreadable])


def tables_of(results: Results) -> list[Table]:
    """Return the tables of the rows that have runs."""
    unreadable = results.unreadable
    return [table_of(row, groups, unreadable.get(row, ())) for row, groups in results.rows.items()]


def _line(group: Group) -> tuple[str, ...]:
    accuracy = show_spread(group.over_seeds(lambda s: s.accuracy))
    recalibrated = show_spread(group.over_seeds(lambda s: s.recalibrated_accuracy))
    if not group.finished:
        return (group.column, accuracy, recalibrated, "0", *["–"] * (len(HEADERS) - 4))
    plan = group.runs[0].plan
    updates, epochs = float(plan.updates), float(plan.seen.epochs)
    if plan.recipe.hold == "distance":  # the plan has upper bounds only
        updates = mean(group.over_seeds(lambda s: s.updates))
        epochs = mean(group.over_seeds(lambda s: s.epochs))
    return (
        group.column,
        accuracy,
        recalibrated,
        str(len(group.finished)),
        f"{plan.recipe.batch:,}",
        str(plan.ghosts) if plan.recipe.ghost else "plain",
        f"{updates:,.0f}",
        f"{epochs:.4g}",
        show_spread(group.over_seeds(lambda s: s.distance)),
        f"{mean(group.over_seeds(lambda s: s.seconds)):.1f}",
    )


def show_spread(values: Sequence[float], digits: int = 1) -> str:
    """Return the mean, and the sample standard deviation if there are several values, as text.

    >>> show_spread([96.5, 96.2, 96.2]), show_spread([96.2], digits=2), show_spread([])
    ('96.3 ± 0.2', '96.20', '–')
    """
    if not values:
        return "–"
    spread = f" ± {stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{mean(values):.{digits}f}{spread}"


def show_rates(plan: Plan) -> str:
    """Return the learning rates of a plan and the updates at which they begin, as text."""
    latest = "at most " if plan.recipe.hold == "distance" else ""
    drops = (f", {plan.rates(drop).lr:.4g} ({latest}{drop})" for drop in plan.drop_updates)
    schedule = plan.regime.schedule
    end = "" if schedule == "drops" else f", {schedule} to 0 ({plan.updates})"
    warm = update_at(plan.regime.warmup, plan.samples, plan.held_batch)
    return f"{plan.regime.lr:.4g} ({warm})" + "".join(drops) + end
