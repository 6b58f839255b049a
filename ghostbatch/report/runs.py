"""Run folders, read back: all that a report is made from."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import nan
from pathlib import Path
from statistics import mean, stdev

from ghostbatch.errors import InputError
from ghostbatch.recipe import Plan, Recipe
from ghostbatch.study import columns
from ghostbatch.train import Record, Summary, read_header, read_records, read_summary

COLUMN_ORDER = list(columns(large=2, ghost=2))


@dataclass(frozen=True)
class Run:
    """One run folder."""

    row: str
    column: str
    plan: Plan
    device: str
    records: tuple[Record, ...]
    summary: Summary | None
    """None while the run has not ended."""


@dataclass(frozen=True)
class Group:
    """The seeds of one cell of a table."""

    row: str
    column: str
    runs: tuple[Run, ...]
    """Those that finished."""
    unfinished: int
    diverged: int

    def over_seeds(self, quantity: Callable[[Summary], float]) -> "Spread":
        """Mean and standard deviation of a final quantity over the finished runs."""
        return spread(quantity(run.summary) for run in self.runs if run.summary is not None)


@dataclass(frozen=True)
class Spread:
    """A mean with its error bar."""

    mean: float
    deviation: float
    """Sample standard deviation; NaN for a single value, which has none."""
    count: int

    def show(self, digits: int) -> str:
        """The mean, and the deviation where there is one.

        >>> spread([96.5, 96.2, 96.2]).show(1), spread([96.2]).show(1), spread([]).show(1)
        ('96.3 ± 0.2', '96.2', '–')
        """
        if not self.count:
            return "–"
        deviation = f" ± {self.deviation:.{digits}f}" if self.count > 1 else ""
        return f"{self.mean:.{digits}f}{deviation}"


def spread(values: Iterable[float]) -> Spread:
    """The spread of some values."""
    numbers = list(values)
    return Spread(
        mean(numbers) if numbers else nan,
        stdev(numbers) if len(numbers) > 1 else nan,
        len(numbers),
    )


def read_runs(folder: Path) -> list[Run]:
    """All runs below ``folder``: a study's, or a single run's own."""
    top = folder.resolve()
    found = [_read_run(path.parent, top) for path in sorted(top.rglob("run.json"))]
    if not found:
        raise InputError(
            "folder", f"{folder} holds no runs", "name the --out of a study or of a train"
        )
    return found


def _read_run(folder: Path, top: Path) -> Run:
    header = read_header(folder)
    try:
        recipe = Recipe.from_dict(header["recipe"])
    except (TypeError, KeyError):
        raise InputError(
            "folder", f"{folder} is of another version", "report it with that version"
        ) from None
    if folder.name == f"seed-{recipe.seed}" and len(folder.parts) > 3:
        row, column = folder.parts[-3:-1]
    else:  # a run by itself goes by the name of its folder
        row, column = f"{recipe.model}-{recipe.data}", str(folder.relative_to(top.parent))
    return Run(
        row=row,
        column=column,
        plan=recipe.plan(header["samples"]),
        device=header["device"],
        records=tuple(read_records(folder / "metrics.jsonl")),
        summary=read_summary(folder / "summary.json"),
    )


def _without_seed(run: Run) -> dict[str, object]:
    """What the seeds of a cell share; each follows a reference of its own, if any."""
    fields = run.plan.recipe.as_dict()
    return {name: value for name, value in fields.items() if name not in ("seed", "reference")}


def natural(name: str) -> list[str | float]:
    """A key that sorts numbers in names by their size.

    >>> sorted(["batch 1024", "batch 32", "x 2", "x 0.5"], key=natural)
    ['batch 32', 'batch 1024', 'x 0.5', 'x 2']
    """
    words = re.split(r"(\d+(?:\.\d+)?)", name)
    return [float(word) if number % 2 else word for number, word in enumerate(words)]


def group_runs(runs: Iterable[Run]) -> list[Group]:
    """Gather the seeds of each cell, in the order of the paper's columns."""
    cells: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        members = cells.setdefault((run.row, run.column), [])
        if members and _without_seed(run) != _without_seed(members[0]):
            raise InputError(
                "folder",
                f"{run.row} {run.column} holds runs of different recipes",
                "report the folder of one study",
            )
        members.append(run)

    def order(cell: tuple[str, str]) -> tuple[str, int, list[str | float]]:
        row, column = cell
        known = column in COLUMN_ORDER
        return row, COLUMN_ORDER.index(column) if known else len(COLUMN_ORDER), natural(column)

    groups = []
    for row, column in sorted(cells, key=order):
        members = cells[row, column]
        statuses = [run.summary.status if run.summary else "unfinished" for run in members]
        finished = [r for r, s in zip(members, statuses, strict=True) if s == "finished"]
        groups.append(
            Group(
                row,
                column,
                tuple(finished),
                unfinished=statuses.count("unfinished"),
                diverged=statuses.count("diverged"),
            )
        )
    return groups
