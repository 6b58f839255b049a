"""The tables of a study as text, for the terminal and the page."""

from dataclasses import dataclass

from ghostbatch.recipe import Plan
from ghostbatch.report.runs import Group

HEADERS = ("", "accuracy %", "seeds", "batch", "ghosts", "updates", "epochs", "distance", "s / run")


@dataclass(frozen=True)
class Table:
    """One row of the paper's table; each of its columns is a line here."""

    title: str
    lines: list[tuple[str, ...]]
    notes: list[str]


def tables(groups: list[Group]) -> list[Table]:
    """Return one table per row of the study."""
    titles = dict.fromkeys(group.row for group in groups)
    return [_table(title, [g for g in groups if g.row == title]) for title in titles]


def _table(title: str, groups: list[Group]) -> Table:
    notes = [
        f"{group.column}: {count} of {len(group.runs) + group.unfinished + group.diverged} {what}"
        for group in groups
        for count, what in ((group.diverged, "diverged"), (group.unfinished, "not finished"))
        if count
    ]
    return Table(title, [_line(group) for group in groups], notes)


def _line(group: Group) -> tuple[str, ...]:
    accuracy = group.over_seeds(lambda s: s.accuracy).show(1)
    if not group.runs:
        return (group.column, accuracy, "0", *["–"] * (len(HEADERS) - 3))
    plan = group.runs[0].plan
    updates, epochs = float(plan.updates), float(plan.seen.epochs)
    if plan.recipe.hold == "distance":  # the plan has upper bounds only
        updates = group.over_seeds(lambda s: s.updates).mean
        epochs = group.over_seeds(lambda s: s.epochs).mean
    return (
        group.column,
        accuracy,
        str(len(group.runs)),
        f"{plan.recipe.batch:,}",
        str(plan.ghosts) if plan.recipe.ghost else "plain",
        f"{updates:,.0f}",
        f"{epochs:.4g}",
        group.over_seeds(lambda s: s.distance).show(1),
        f"{group.over_seeds(lambda s: s.seconds).mean:.1f}",
    )


def show_rates(plan: Plan) -> str:
    """Return the learning rates of a plan and the updates at which they begin, as text."""
    starts = (0, *plan.drop_updates)
    latest = "at most " if plan.recipe.hold == "distance" else ""
    shown = (f"({latest if start else ''}{start})" for start in starts)
    return ", ".join(
        f"{plan.rates(start).lr:.4g} {when}" for start, when in zip(starts, shown, strict=True)
    )
