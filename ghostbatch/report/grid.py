"""Tables of text: the table of a row, and the paper's table of rows by columns."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean

from ghostbatch.report.entries import Entry, show_gap
from ghostbatch.report.table import show_spread


@dataclass(frozen=True)
class Grid:
    """A table of text."""

    headers: tuple[str, ...]
    lines: Sequence[tuple[str, ...]]


def row_grid(entries: Sequence[Entry]) -> Grid:
    """Return the table of a row of the study, one line per column, with what the runs have."""
    first = entries[0].column
    named = {
        "": [entry.column for entry in entries],
        "accuracy %": [show_spread([*entry.accuracies.values()], 2) for entry in entries],
        "n": [str(len(entry.accuracies)) for entry in entries],
        "recalibrated %": [
            show_spread([*entry.recalibrated.values()], 2) if entry.recalibrated else ""
            for entry in entries
        ],
        "paper %": [_number(entry.paper, ".2f") for entry in entries],
        "difference": [_number(entry.difference, "+.2f") for entry in entries],
        f"gap to {first}, 95 %": [show_gap(entry.gap) for entry in entries],
        "EMA %": [
            show_spread([*entry.averaged.values()], 2) if entry.averaged else ""
            for entry in entries
        ],
        f"EMA, gap to {first}": [show_gap(entry.averaged_gap) for entry in entries],
        **{name: [_costs(entry)[name] for entry in entries] for name in COSTS},
        "marks": ["; ".join(entry.marks) for entry in entries],
    }
    shown = {name: texts for name, texts in named.items() if any(texts) or name in COSTS}
    return Grid(tuple(shown), list(zip(*shown.values(), strict=True)))


COSTS = ("batch", "ghosts", "updates", "epochs", "distance", "s / run")


def _costs(entry: Entry) -> dict[str, str]:
    """Return what the runs of an entry did, on average; dashes if none has finished."""
    runs = entry.group.finished if entry.group else []
    ends = [run.summary for run in runs if run.summary]
    if not ends:
        return dict.fromkeys(COSTS, "–")
    plan = runs[0].plan
    return {
        "batch": f"{plan.recipe.batch:,}",
        "ghosts": str(plan.ghosts) if plan.recipe.ghost else "plain",
        "updates": f"{mean(end.updates for end in ends):,.0f}",
        "epochs": f"{mean(end.epochs for end in ends):.4g}",
        "distance": f"{mean(end.distance for end in ends):.4g}",
        "s / run": f"{mean(end.seconds for end in ends):,.1f}",
    }


def _number(value: float | None, form: str) -> str:
    return "" if value is None else f"{value:{form}}"


def by_columns(rows: dict[str, list[Entry]]) -> list[dict[str, list[Entry]]]:
    """Return the rows in groups that have the same columns, in order."""
    groups: dict[tuple[str, ...], dict[str, list[Entry]]] = {}
    for row, entries in rows.items():
        groups.setdefault(tuple(entry.column for entry in entries), {})[row] = entries
    return list(groups.values())


def overview(rows: dict[str, list[Entry]]) -> Grid:
    """Return the table of rows by columns, as the paper prints it; the rows have equal columns."""
    lines: list[tuple[str, ...]] = []
    for row, entries in rows.items():
        texts = (show_spread([*e.accuracies.values()], 2) for e in entries)
        counts = (f" ({len(e.accuracies)})" if e.accuracies else "" for e in entries)
        lines.append((row, *(text + n for text, n in zip(texts, counts, strict=True))))
        if any(entry.paper is not None for entry in entries):
            lines.append(("the paper", *(_number(entry.paper, ".2f") for entry in entries)))
    columns = next(iter(rows.values()))
    return Grid(("", *(entry.column for entry in columns)), lines)
