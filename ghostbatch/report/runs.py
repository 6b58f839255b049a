"""Reads the folder of a study or of single runs: everything that a report is made from."""

import warnings
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from typing import Any

from ghostbatch.errors import InputError
from ghostbatch.recipe import Plan, Recipe
from ghostbatch.report.records import RunRecords, read_run_records
from ghostbatch.study import Instrument, Row, Study, read_study
from ghostbatch.study.instruments import MEASUREMENTS
from ghostbatch.study.manifest import NAME
from ghostbatch.study.rows import COLUMNS
from ghostbatch.train import Summary, read_header, read_summary


@dataclass(frozen=True)
class Run:
    """One run folder."""

    folder: Path
    plan: Plan
    header: dict[str, Any]
    """The content of ``run.json``: versions, device, commit and more."""
    records: RunRecords
    summary: Summary | None
    """None while the run has not ended."""

    @property
    def seed(self) -> int:
        """The seed of the recipe."""
        return self.plan.recipe.seed

    @property
    def date(self) -> str:
        """When the run last wrote one of its files, as the file system tells."""
        files = (self.folder / name for name in ("summary.json", "metrics.jsonl", "run.json"))
        latest = next(path.stat().st_mtime for path in files if path.exists())
        return datetime.fromtimestamp(latest, UTC).strftime("%Y-%m-%d %H:%M UTC")

    @property
    def status(self) -> str:
        """One of "finished", "diverged" and "not finished"."""
        return self.summary.status if self.summary else "not finished"


@dataclass(frozen=True)
class Group:
    """The runs of one column of a row: one per seed."""

    column: str
    runs: list[Run]

    @property
    def finished(self) -> list[Run]:
        """The runs that ended without diverging."""
        return [run for run in self.runs if run.status == "finished"]

    @property
    def unfinished(self) -> dict[str, int]:
        """How many runs have diverged and have not finished; without zeros."""
        statuses = [run.status for run in self.runs]
        counts = {status: statuses.count(status) for status in ("diverged", "not finished")}
        return {status: count for status, count in counts.items() if count}

    def ends(self, name: str) -> dict[int, float]:
        """Return a field of the summaries of the finished runs that have it, by seed."""
        values = {run.seed: getattr(run.summary, name) for run in self.finished}
        return {seed: value for seed, value in values.items() if value is not None}


@dataclass(frozen=True)
class Results:
    """A study's declaration, and the runs found in its folder."""

    study: Study
    """What ``study.json`` declares, or what the folders' names tell; no rows for single runs."""
    rows: dict[str, list[Group]]
    """The columns that have runs, by row; in the order of the study."""
    unreadable: dict[str, list[str]]
    """By row, a line for each run that cannot be read; single runs have the row ""."""
    missing: dict[tuple[str, str], list[int]] = field(default_factory=dict)
    """By row and column, the declared seeds whose run has not begun."""


FILES = ("run.json", "summary.json", "checkpoint.pt")
"""Of these a run that has begun has at least one."""

Place = tuple[str, str, str, Path]
"""Row, column and name of a run, and its folder; a single run has the row ""."""


def read_results(folder: Path) -> Results:
    """Read the folder of a study, of a part of one, or of single runs.

    A run with a file that cannot be read is warned of and left out; refused is a folder in which
    no run can be read.
    """
    top = folder.resolve()
    home = next((path for path in (top, *top.parents[:3]) if (path / NAME).is_file()), top)
    study = read_study(home) or _found_study(top)
    places, missing = _declared_runs(study, home, top)
    if not places:
        study, missing = replace(study, rows={}), {}
        paths = sorted(top.rglob("run.json"))
        names = [str(path.parent.relative_to(top.parent)) for path in paths]
        places = [("", name, name, path.parent) for name, path in zip(names, paths, strict=True)]
    runs: dict[tuple[str, str], list[Run]] = {}
    unreadable: dict[str, list[str]] = {}
    errors = []
    for row, column, name, place in places:
        try:
            run = _read_run(place)
        except InputError as error:
            unreadable.setdefault(row, []).append(f"{name} cannot be read: {error.problem}")
            errors.append(InputError(f"{row} {name}".strip(), error.problem, error.remedy))
        else:
            recipe = run.plan.recipe
            runs.setdefault((row or f"{recipe.model}-{recipe.data}", column), []).append(run)
    if errors and not runs:
        first = errors[0]
        raise InputError("folder", f"no run can be read ({first.problem})", first.remedy)
    for each in errors:
        warnings.warn(f"{each.field} is left out: {each.problem}; {each.remedy}", stacklevel=2)
    measured = any((top / f"{each.name}.json").exists() for each in study.instruments)
    if not runs and not measured:
        remedy = "name the folder of a study or of a run"
        raise InputError("folder", f"{folder} holds no runs", remedy)
    rows: dict[str, list[Group]] = {}
    for (row, column), members in runs.items():
        if _differing(members) - {"seed", "reference"}:
            problem = f"{row} {column} holds runs of different recipes"
            raise InputError("folder", problem, "report the folder of one study")
        rows.setdefault(row, []).append(Group(column, members))
    return Results(study, rows, unreadable, missing)


def _found_study(top: Path) -> Study:
    """Return the study whose runs are the folders ROW/COLUMN/seed-K in ``top``, and instruments.

    The paper's columns come first, in its order. A run whose run.json is damaged declares nothing.
    """
    rows: dict[str, dict[str, Recipe]] = {}
    seeds = set()
    for path in sorted(top.glob("*/*/seed-*/run.json")):
        with suppress(InputError):
            recipe = Recipe.from_dict(read_header(path.parent)["recipe"])
            rows.setdefault(path.parts[-4], {})[path.parts[-3]] = recipe
            seeds.add(recipe.seed)
    order = [*COLUMNS, *dict.fromkeys(column for row in rows.values() for column in row)]
    declared = {
        row: Row({column: found[column] for column in dict.fromkeys(order) if column in found})
        for row, found in rows.items()
    }
    instruments = tuple(map(Instrument, MEASUREMENTS))
    return Study(top.name, declared, tuple(sorted(seeds)), instruments)


def _declared_runs(
    study: Study, home: Path, top: Path
) -> tuple[list[Place], dict[tuple[str, str], list[int]]]:
    """Return the runs below ``top`` that have begun, and the missing seeds as in `Results`.

    ``home`` is the folder of the study that declares them.
    """
    places: list[Place] = []
    missing: dict[tuple[str, str], list[int]] = {}
    for row, declared in study.rows.items():
        for column, seed in product(declared.columns, study.seeds):
            folder = home / row / column / f"seed-{seed}"
            if not folder.is_relative_to(top):
                continue
            if any((folder / name).exists() for name in FILES):
                places.append((row, column, f"{column} seed {seed}", folder))
            else:
                missing.setdefault((row, column), []).append(seed)
    return places, missing


def _read_run(folder: Path) -> Run:
    """Return the run in a folder; raise `InputError` if one of its files cannot be read."""
    try:
        header = read_header(folder)
        plan = Recipe.from_dict(header["recipe"]).plan(header["samples"])
        records = read_run_records(folder / "metrics.jsonl", plan.updates)
        summary = read_summary(folder / "summary.json")
        last = max((record.update for record in records.shown), default=0)
        if summary is not None and last < summary.updates:
            lost = f"records after update {last:,} of {summary.updates:,} are missing"
            warnings.warn(f"{folder / 'metrics.jsonl'}: {lost}", stacklevel=2)
        return Run(folder, plan, header, records, summary)
    except OSError as error:
        problem = f"{error.filename}: {error.strerror}"
        raise InputError("folder", problem, "make it readable") from None


def _differing(runs: list[Run]) -> set[str]:
    """Return the fields in which the runs' recipes are not all the same."""
    first, *others = (vars(run.plan.recipe) for run in runs)
    return {name for name in first if any(first[name] != other[name] for other in others)}
