"""Tables of text: of a row of the study for the terminal and for the page, and the paper's."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from statistics import mean, stdev

from ghostbatch.optim import update_at
from ghostbatch.recipe import Plan
from ghostbatch.report.entries import Entry, show_gap
from ghostbatch.report.runs import Group, Results

COSTS = ("batch", "ghosts", "updates", "epochs", "distance", "s / run")
HEADERS = ("", "accuracy %", "recal. %", "seeds", *COSTS)
"""Headers of a table for the terminal."""

RECALIBRATED = "recal. %: accuracy with running statistics that are averages over the training set"


@dataclass(frozen=True)
class Table:
    """A table of text."""

    headers: tuple[str, ...]
    lines: Sequence[tuple[str, ...]]
    title: str = ""
    notes: Sequence[str] = ()


def tables_of(results: Results) -> list[Table]:
    """Return a table for the terminal of each row that has runs, one line per column."""
    return [
        Table(HEADERS, list(map(_line, groups)), row, _notes(results, row))
        for row, groups in results.rows.items()
    ]


def _notes(results: Results, row: str) -> list[str]:
    """Return the notes below the table of a row."""
    groups = results.rows[row]
    notes = [
        f"{group.column}: {count} of {len(group.runs)} {status}"
        for group in groups
        for status, count in group.unfinished.items()
    ]
    held = {group.column: group.runs[0].plan.recipe.holdout for group in groups}
    if len(held) > 1 and len(set(held.values())) == 1:
        held = {"all columns": groups[0].runs[0].plan.recipe.holdout}
    notes += [
        f"{column}: accuracy on {count:,} held-out training images, not on the test set"
        for column, count in held.items()
        if count
    ]
    notes += [
        f"{group.column}: {show_spread(averaged.values())} % with averaged weights"
        for group in groups
        if (averaged := group.ends("ema_accuracy"))
    ]
    if any(group.ends("recalibrated_accuracy") for group in groups):
        notes.append(RECALIBRATED)
    return notes + results.unreadable.get(row, [])


def _line(group: Group) -> tuple[str, ...]:
    costs = _costs(group)
    if group.finished:
        plan = group.runs[0].plan
        costs["distance"] = show_spread(group.ends("distance").values())
        costs["s / run"] = f"{mean(group.ends('seconds').values()):.1f}"
        if plan.recipe.hold != "distance":  # with it, the plan has upper bounds only
            costs["epochs"] = f"{float(plan.seen.epochs):.4g}"
    accuracies = (group.ends(name).values() for name in ("accuracy", "recalibrated_accuracy"))
    count = str(len(group.finished))
    return (group.column, *map(show_spread, accuracies), count, *costs.values())


def _costs(group: Group) -> dict[str, str]:
    """Return what the finished runs of a column did, on average; dashes if there are none."""
    if not group.finished:
        return dict.fromkeys(COSTS, "–")
    plan = group.runs[0].plan
    names = ("updates", "epochs", "distance", "seconds")
    updates, epochs, distance, seconds = (mean(group.ends(name).values()) for name in names)
    return {
        "batch": show_batches(plan),
        "ghosts": str(plan.ghosts) if plan.recipe.ghost else "plain",
        "updates": f"{updates:,.0f}",
        "epochs": f"{epochs:.4g}",
        "distance": f"{distance:.4g}",
        "s / run": f"{seconds:,.1f}",
    }


def row_table(entries: Sequence[Entry]) -> Table:
    """Return the page's table of a row, one line per column; headers without values are left out.

    It has no title and no notes.
    """
    first = entries[0].column
    lines = [
        {
            "": entry.column,
            "accuracy %": show_spread(entry.accuracies.values(), 2),
            "n": str(len(entry.accuracies)),
            "recalibrated %": _spread_or_nothing(entry.recalibrated),
            "paper %": _number(entry.paper, ".2f"),
            "difference": _number(entry.difference, "+.2f"),
            f"gap to {first}, 95 %": show_gap(entry.gap),
            "EMA %": _spread_or_nothing(entry.averaged),
            f"EMA, gap to {first}": show_gap(entry.averaged_gap),
            **_costs(entry.group),
            "marks": "; ".join(entry.marks),
        }
        for entry in entries
    ]
    headers = tuple(name for name in lines[0] if any(line[name] for line in lines))
    return Table(headers, [tuple(line[name] for name in headers) for line in lines])


def _spread_or_nothing(values: dict[int, float]) -> str:
    return show_spread(values.values(), 2) if values else ""


def _number(value: float | None, form: str) -> str:
    return "" if value is None else f"{value:{form}}"


def by_columns(rows: dict[str, list[Entry]]) -> list[dict[str, list[Entry]]]:
    """Return the rows in groups that have the same columns, in order."""
    groups: dict[tuple[str, ...], dict[str, list[Entry]]] = {}
    for row, entries in rows.items():
        groups.setdefault(tuple(entry.column for entry in entries), {})[row] = entries
    return list(groups.values())


def overview(rows: dict[str, list[Entry]]) -> Table:
    """Return the table of rows by columns, as the paper prints it; the rows have equal columns."""
    lines: list[tuple[str, ...]] = []
    for row, entries in rows.items():
        spreads = [show_spread(entry.accuracies.values(), 2) for entry in entries]
        counts = [f" ({len(entry.accuracies)})" if entry.accuracies else "" for entry in entries]
        lines.append((row, *map("".join, zip(spreads, counts, strict=True))))
        if any(entry.paper is not None for entry in entries):
            lines.append(("the paper", *(_number(entry.paper, ".2f") for entry in entries)))
    columns = next(iter(rows.values()))
    return Table(("", *(entry.column for entry in columns)), lines)


def show_spread(values: Collection[float], digits: int = 1) -> str:
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


def show_batches(plan: Plan) -> str:
    """Return the batch as text; one that grows in each phase, with the update where it begins."""
    sizes = [f"{size * plan.recipe.batch:,}" for size in plan.batches]
    if plan.recipe.grow is None:
        return sizes[0]
    starts = (0, *plan.drop_updates)
    return ", ".join(f"{size} ({start})" for size, start in zip(sizes, starts, strict=True))
