"""Reads the folder of a study or of single runs: everything that a report is made from."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from math import nan
from pathlib import Path
from statistics import mean, stdev

from ghostbatch.errors import InputError
from ghostbatch.recipe import Plan, Recipe
from ghostbatch.study import Manifest, RowEntry
from ghostbatch.study.instruments import MEASUREMENTS
from ghostbatch.study.studies import PAPER_NOTE, columns
from ghostbatch.train import Record, Summary, read_header, read_records, read_summary

PAPER_COLUMNS = list(columns(large=2, ghost=2))


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
        """Return mean and standard deviation of a final quantity over the finished runs."""
        return spread(quantity(run.summary) for run in self.runs if run.summary is not None)


@dataclass(frozen=True)
class Spread:
    """A mean and its standard deviation."""

    mean: float
    deviation: float
    """Sample standard deviation; NaN for a single value."""
    count: int

    def show(self, digits: int) -> str:
        """Return the mean, and the deviation if there is more than one value.

        >>> spread([96.5, 96.2, 96.2]).show(1), spread([96.2]).show(1), spread([]).show(1)
        ('96.3 ± 0.2', '96.2', '–')
        """
        if not self.count:
            return "–"
        deviation = f" ± {self.deviation:.{digits}f}" if self.count > 1 else ""
        return f"{self.mean:.{digits}f}{deviation}"


def spread(values: Iterable[float]) -> Spread:
    """Return mean and standard deviation of some values."""
    numbers = list(values)
    return Spread(
        mean(numbers) if numbers else nan,
        stdev(numbers) if len(numbers) > 1 else nan,
        len(numbers),
    )


@dataclass(frozen=True)
class Results:
    """What a folder holds."""

    manifest: Manifest
    groups: list[Group]
    """In the order of the manifest."""
    devices: list[str]


def read_results(folder: Path) -> Results:
    """Read a study's folder, or one of single runs."""
    top = folder.resolve()
    manifest = Manifest.read(top)
    if manifest is not None:
        runs = [
            _read_run(path, row, column)
            for row, entry in manifest.rows.items()
            for column in entry.columns
            for path in (top / row / column / f"seed-{seed}" for seed in manifest.seeds)
            if (path / "run.json").exists()
        ]
    else:
        runs = [_read_unlisted(path.parent, top) for path in sorted(top.rglob("run.json"))]
        manifest = _infer_manifest(top, runs)
    measured = any((top / f"{name}.json").exists() for name in manifest.instruments)
    if not runs and not measured:
        raise InputError(
            "folder", f"{folder} holds no runs", "name the folder of a study or of a run"
        )
    return Results(manifest, _group(manifest, runs), sorted({run.device for run in runs}))


def _read_run(folder: Path, row: str, column: str) -> Run:
    header = read_header(folder)
    try:
        recipe = Recipe.from_dict(header["recipe"])
    except (TypeError, KeyError):
        raise InputError(
            "folder", f"{folder} is of another version", "report it with that version"
        ) from None
    return Run(
        row=row,
        column=column,
        plan=recipe.plan(header["samples"]),
        device=header["device"],
        records=tuple(read_records(folder / "metrics.jsonl")),
        summary=read_summary(folder / "summary.json"),
    )


# ------------------------------------------------------------ folders without study.json


def _read_unlisted(folder: Path, top: Path) -> Run:
    """Read a single run, or a run ROW/COLUMN/seed-K of a study without ``study.json``."""
    run = _read_run(folder, "", str(folder.relative_to(top.parent)))
    recipe = run.plan.recipe
    if folder.name == f"seed-{recipe.seed}" and len(folder.parts) > 3:
        return replace(run, row=folder.parts[-3], column=folder.parts[-2])
    return replace(run, row=f"{recipe.model}-{recipe.data}")


def _infer_manifest(top: Path, runs: Iterable[Run]) -> Manifest:
    """Describe runs by their rows and columns: the paper's columns in its order, then others."""

    def order(column: str) -> tuple[int, list[str | float]]:
        known = column in PAPER_COLUMNS
        return PAPER_COLUMNS.index(column) if known else len(PAPER_COLUMNS), natural(column)

    found: dict[str, set[str]] = {}
    for run in runs:
        found.setdefault(run.row, set()).add(run.column)
    rows = {
        row: RowEntry(
            tuple(sorted(found[row], key=order)), note=PAPER_NOTE if "LB" in found[row] else ""
        )
        for row in sorted(found)
    }
    measured = tuple(name for name in MEASUREMENTS if (top / f"{name}.json").exists())
    return Manifest(top.name, rows, instruments=measured)


def natural(name: str) -> list[str | float]:
    """Return a key that sorts numbers in names by their size.

    >>> sorted(["batch 1024", "batch 32", "x 2", "x 0.5"], key=natural)
    ['batch 32', 'batch 1024', 'x 0.5', 'x 2']
    """
    words = re.split(r"(\d+(?:\.\d+)?)", name)
    return [float(word) if number % 2 else word for number, word in enumerate(words)]


# ------------------------------------------------------------------------------- groups


def _group(manifest: Manifest, runs: Iterable[Run]) -> list[Group]:
    """Gather the seeds of each cell; leave out cells without any run."""
    cells: dict[tuple[str, str], list[Run]] = {
        (row, column): [] for row, entry in manifest.rows.items() for column in entry.columns
    }
    for run in runs:
        cells[run.row, run.column].append(run)
    return [_gather(members) for members in cells.values() if members]


def _gather(members: list[Run]) -> Group:
    """Return the group of one cell's runs; refuse runs of different recipes."""
    row, column = members[0].row, members[0].column
    if any(_without_seed(run) != _without_seed(members[0]) for run in members):
        raise InputError(
            "folder",
            f"{row} {column} holds runs of different recipes",
            "report the folder of one study",
        )
    statuses = [run.summary.status if run.summary else "unfinished" for run in members]
    return Group(
        row,
        column,
        tuple(r for r, status in zip(members, statuses, strict=True) if status == "finished"),
        unfinished=statuses.count("unfinished"),
        diverged=statuses.count("diverged"),
    )


def _without_seed(run: Run) -> dict[str, object]:
    """Return the fields that all seeds of a cell share."""
    fields = run.plan.recipe.as_dict()
    return {name: value for name, value in fields.items() if name not in ("seed", "reference")}
