"""Reads the folder of a study or of single runs: everything that a report is made from."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ghostbatch.errors import InputError
from ghostbatch.recipe import Plan, Recipe
from ghostbatch.report.records import RunRecords, read_run_records
from ghostbatch.study import Instrument, Study, read_study
from ghostbatch.study.instruments import MEASUREMENTS
from ghostbatch.study.manifest import NAME
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

    def over_seeds(self, quantity: Callable[[Summary], float | None]) -> list[float]:
        """Return a quantity at the end of each finished run that has it."""
        values = (quantity(run.summary) for run in self.finished if run.summary)
        return [value for value in values if value is not None]


@dataclass(frozen=True)
class Results:
    """A study's declaration, and the runs found in its folder."""

    study: Study
    """What ``study.json`` declares; without that file, no rows and all instruments."""
    rows: dict[str, list[Group]]
    """The columns that have runs, by row; in the order of the study."""
    unreadable: dict[str, list[str]]
    """By row, a line for each run that cannot be read; single runs have the row ""."""
    missing: dict[tuple[str, str], list[int]] = field(default_factory=dict)
    """By row and column, the declared seeds whose run has not begun."""


FILES = ("run.json", "summary.json", "checkpoint.pt")
"""Of these a run that has begun has at least one."""


class RunReader:
    """Reads runs one by one, and notes those that cannot be read."""

    def __init__(self) -> None:
        self.runs: dict[tuple[str, str], list[Run]] = {}
        """By row and column."""
        self.unreadable: dict[str, list[str]] = {}
        """As in `Results`."""
        self.errors: list[InputError] = []
        """Why each of these cannot be read."""
        self.missing: dict[tuple[str, str], list[int]] = {}
        """As in `Results`."""

    def read(self, folder: Path, name: str, row: str = "") -> Run | None:
        """Return the run in a folder, or None if one of its files cannot be read."""
        try:
            return _read_run(folder)
        except InputError as error:
            problem, remedy = error.problem, error.remedy
        except OSError as error:
            problem, remedy = f"{error.filename}: {error.strerror}", "make it readable"
        line = f"{name} cannot be read: {problem}"
        self.unreadable.setdefault(row, []).append(line)
        self.errors.append(InputError(f"{row} {name}".strip(), problem, remedy))
        return None

    def read_study(self, study: Study, home: Path, top: Path) -> None:
        """Read the runs below ``top`` that the study in the folder ``home`` declares."""
        for row, declared in study.rows.items():
            for column in declared.columns:
                for seed in study.seeds:
                    folder = home / row / column / f"seed-{seed}"
                    if not folder.is_relative_to(top):
                        continue
                    if not any((folder / name).exists() for name in FILES):
                        self.missing.setdefault((row, column), []).append(seed)
                    elif (run := self.read(folder, f"{column} seed {seed}", row)) is not None:
                        self.runs.setdefault((row, column), []).append(run)

    def read_single(self, top: Path) -> None:
        """Read every run below ``top`` as a single one, under the name of its folder."""
        for path in sorted(top.rglob("run.json")):
            name = str(path.parent.relative_to(top.parent))
            if (run := self.read(path.parent, name)) is not None:
                self.runs[f"{run.plan.recipe.model}-{run.plan.recipe.data}", name] = [run]


def read_results(folder: Path) -> Results:
    """Read the folder of a study, of a part of one, or of single runs.

    A run with a file that cannot be read is warned of and left out; refused is a folder in which
    no run can be read.
    """
    top = folder.resolve()
    home = next((path for path in (top, *top.parents[:3]) if (path / NAME).is_file()), top)
    study = read_study(home) or Study(top.name, instruments=tuple(map(Instrument, MEASUREMENTS)))
    found = RunReader()
    found.read_study(study, home, top)
    if not (found.runs or found.unreadable):
        study, found.missing = replace(study, rows={}), {}
        found.read_single(top)
    if found.errors and not found.runs:
        first = found.errors[0]
        raise InputError("folder", f"no run can be read ({first.problem})", first.remedy)
    for error in found.errors:
        warnings.warn(f"{error.field} is left out: {error.problem}; {error.remedy}", stacklevel=2)
    measured = any((top / f"{each.name}.json").exists() for each in study.instruments)
    if not found.runs and not measured:
        raise InputError(
            "folder", f"{folder} holds no runs", "name the folder of a study or of a run"
        )
    rows: dict[str, list[Group]] = {}
    for (row, column), members in found.runs.items():
        if _differing(members) - {"seed", "reference"}:
            problem = f"{row} {column} holds runs of different recipes"
            raise InputError("folder", problem, "report the folder of one study")
        rows.setdefault(row, []).append(Group(column, members))
    return Results(study, rows, found.unreadable, found.missing)


def _differing(runs: list[Run]) -> set[str]:
    """Return the fields in which the runs' recipes are not all the same."""
    first, *others = (vars(run.plan.recipe) for run in runs)
    return {name for name in first if any(first[name] != other[name] for other in others)}


def _read_run(folder: Path) -> Run:
    header = read_header(folder)
    plan = Recipe.from_dict(header["recipe"]).plan(header["samples"])
    return Run(
        folder=folder,
        plan=plan,
        header=header,
        records=read_run_records(folder / "metrics.jsonl", plan.updates),
        summary=read_summary(folder / "summary.json"),
    )
