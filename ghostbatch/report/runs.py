"""Reads the folder of a study or of single runs: everything that a report is made from."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ghostbatch.errors import InputError
from ghostbatch.recipe import Plan, Recipe
from ghostbatch.study import Instrument, Row, Study, read_study
from ghostbatch.study.instruments import MEASUREMENTS
from ghostbatch.study.studies import PAPER_NOTE, columns
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
        """The runs that neither diverged nor are still to be continued."""
        return [run for run in self.runs if run.status == "finished"]

    def over_seeds(self, quantity: Callable[[Summary], float]) -> list[float]:
        """Return a quantity at the end of each finished run."""
        return [quantity(run.summary) for run in self.finished if run.summary]


@dataclass(frozen=True)
class Results:
    """What a folder holds."""

    study: Study
    """What ``study.json`` declares; without that file, only the notes of the paper's rows."""
    rows: dict[str, list[Group]]
    """The columns that have runs, by row; in the order of the study."""


def read_results(folder: Path) -> Results:
    """Read a study's folder, or one of single runs."""
    top = folder.resolve()
    study = read_study(top)
    if study is not None:
        runs = {
            (row, column): [_read_run(path) for path in paths]
            for row, declared in study.rows.items()
            for column in declared.columns
            if (paths := _run_folders(top / row / column, study.seeds))
        }
    else:
        runs = _read_unlisted(top)
        paper = {row: Row({}, note=PAPER_NOTE) for row, column in runs if column == "LB"}
        study = Study(top.name, paper, instruments=tuple(map(Instrument, MEASUREMENTS)))
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


def _run_folders(column: Path, seeds: tuple[int, ...]) -> list[Path]:
    folders = (column / f"seed-{seed}" for seed in seeds)
    return [folder for folder in folders if (folder / "run.json").exists()]


def _read_unlisted(top: Path) -> dict[tuple[str, str], list[Run]]:
    """Read the runs of a folder without ``study.json``, by row and column.

    A folder ROW/COLUMN/seed-K is of a study, or of a part of one; any other is a single run.
    """
    runs: dict[tuple[str, str], list[Run]] = {}
    for path in sorted(top.rglob("run.json")):
        folder, run = path.parent, _read_run(path.parent)
        recipe = run.plan.recipe
        row, column = f"{recipe.model}-{recipe.data}", str(folder.relative_to(top.parent))
        if folder.name == f"seed-{recipe.seed}" and len(folder.parts) > 3:
            row, column = folder.parts[-3:-1]
        runs.setdefault((row, column), []).append(run)
    order = [*columns(large=2, ghost=2), *sorted(column for _, column in runs)]
    return {cell: runs[cell] for cell in sorted(runs, key=lambda c: (c[0], order.index(c[1])))}


def _read_run(folder: Path) -> Run:
    header = read_header(folder)
    try:
        recipe = Recipe.from_dict(header["recipe"])
    except (TypeError, KeyError):
        raise InputError(
            "folder", f"{folder} is of another version", "report it with that version"
        ) from None
    return Run(
        plan=recipe.plan(header["samples"]),
        device=header["device"],
        records=read_records(folder / "metrics.jsonl"),
        summary=read_summary(folder / "summary.json"),
    )
