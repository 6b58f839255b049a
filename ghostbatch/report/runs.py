"""Reads the folder of a study or of single runs: everything that a report is made from."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from ghostbatch.errors import InputError
from ghostbatch.recipe import Plan, Recipe
from ghostbatch.study import Instrument, Study, read_study
from ghostbatch.study.instruments import MEASUREMENTS
from ghostbatch.study.manifest import NAME
from ghostbatch.train import Record, Summary, read_header, read_records, read_summary


@dataclass(frozen=True)
class Run:
    """One run folder."""

    plan: Plan
    device: str
    records: list[Record]
    summary: Summary | None
    """None while the run has not ended."""

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

    def over_seeds(self, quantity: Callable[[Summary], float]) -> list[float]:
        """Return a quantity at the end of each finished run."""
        return [quantity(run.summary) for run in self.finished if run.summary]


@dataclass(frozen=True)
class Results:
    """A study's declaration, and the runs found in its folder."""

    study: Study
    """What ``study.json`` declares; without that file, no rows and all instruments."""
    rows: dict[str, list[Group]]
    """The columns that have runs, by row; in the order of the study."""


def read_results(folder: Path) -> Results:
    """Read the folder of a study, of a part of one, or of single runs."""
    top = folder.resolve()
    home = next((path for path in (top, *top.parents[:3]) if (path / NAME).is_file()), top)
    study = read_study(home) or Study(top.name, instruments=tuple(map(Instrument, MEASUREMENTS)))
    runs: dict[tuple[str, str], list[Run]] = {}
    for row, declared in study.rows.items():
        for column in declared.columns:
            paths = [home / row / column / f"seed-{seed}" for seed in study.seeds]
            paths = [p for p in paths if p.is_relative_to(top) and (p / "run.json").exists()]
            if paths:
                runs[row, column] = [_read_run(path) for path in paths]
    if not runs:  # that a study declares: each is a single run, under the name of its folder
        study = replace(study, rows={})
        for path in sorted(top.rglob("run.json")):
            run, name = _read_run(path.parent), str(path.parent.relative_to(top.parent))
            runs[f"{run.plan.recipe.model}-{run.plan.recipe.data}", name] = [run]
    measured = any((top / f"{each.name}.json").exists() for each in study.instruments)
    if not runs and not measured:
        raise InputError(
            "folder", f"{folder} holds no runs", "name the folder of a study or of a run"
        )
    rows: dict[str, list[Group]] = {}
    for (row, column), members in runs.items():
        recipe, *others = (run.plan.recipe for run in members)
        differing = {name for other in others for name in recipe.differences(other.as_dict())}
        if differing - {"seed", "reference"}:
            problem = f"{row} {column} holds runs of different recipes"
            raise InputError("folder", problem, "report the folder of one study")
        rows.setdefault(row, []).append(Group(column, members))
    return Results(study, rows)


def _read_run(folder: Path) -> Run:
    header = read_header(folder)
    return Run(
        plan=Recipe.from_dict(header["recipe"]).plan(header["samples"]),
        device=header["device"],
        records=read_records(folder / "metrics.jsonl"),
        summary=read_summary(folder / "summary.json"),
    )
