"""What a study is: rows and columns of recipes, seeds, and instruments."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from itertools import product
from pathlib import Path

from ghostbatch.data import find_info
from ghostbatch.errors import InputError, check_choice
from ghostbatch.recipe import Plan, Recipe
from ghostbatch.study.instruments import Instrument

EVALUATIONS = 20
"""Evenly spaced evaluations of a run, as `train` has them."""

FIGURES = ("error-by-update", "error-by-epoch", "distance")
"""Figures of a row that names no others; `ghostbatch.report.figures` has all kinds."""


@dataclass(frozen=True)
class Cell:
    """One run of a study, and its place in the table."""

    row: str
    column: str
    plan: Plan
    evaluations: int = EVALUATIONS
    """Evenly spaced evaluations of the run; more are at its start, see `train`."""

    @property
    def recipe(self) -> Recipe:
        """What the run computes."""
        return self.plan.recipe

    @property
    def name(self) -> str:
        """What messages call the run."""
        return f"{self.row} {self.column} seed {self.recipe.seed}"

    def __hash__(self) -> int:
        """Hash the place in the table; to hash the whole plan takes long."""
        return hash((self.row, self.column, self.recipe.seed))

    @cached_property
    def cost(self) -> float:
        """Estimated work in samples: each batch costs its samples plus an overhead of about 32."""
        return self.plan.length * (self.recipe.batch + 32)

    @property
    def images(self) -> int:
        """Training images that the run sees, counted as often as it sees them."""
        return self.plan.images(self.plan.updates)

    def folder(self, out: Path) -> Path:
        """Return the run's folder in the study's folder."""
        return out / self.row / self.column / f"seed-{self.recipe.seed}"


@dataclass(frozen=True)
class Row:
    """A row of a study's table: a recipe for each column."""

    columns: dict[str, Recipe]
    """With hold "distance", a recipe's reference is the column to follow, at the same seed."""
    figures: tuple[str, ...] = FIGURES
    """Figures that the report draws of the row."""
    note: str = ""
    """A sentence that the report prints below the row's table."""
    paper: dict[str, float] = field(default_factory=dict)
    """The paper's accuracy in percent of the columns that it has."""


@dataclass(frozen=True)
class Study:
    """Rows of runs, each run with every seed, and instruments."""

    name: str
    rows: dict[str, Row] = field(default_factory=dict)
    seeds: tuple[int, ...] = (0, 1, 2)
    instruments: tuple[Instrument, ...] = ()
    scale: float = 1.0
    """Factor of all epochs of all columns; reports print it where it is not 1."""
    evaluations: int = EVALUATIONS
    """Evenly spaced evaluations of each run."""
    targets: tuple[float, ...] = ()
    """Accuracies in percent: the report draws the updates to each of them against the batch."""
    provisional: str = ""
    """What to do before the study can be run; until then `run_study` refuses it."""

    @property
    def columns(self) -> list[str]:
        """Every column of any row."""
        return list(dict.fromkeys(column for row in self.rows.values() for column in row.columns))

    def cells(
        self,
        only: Sequence[str] | None = None,
        seeds: Sequence[int] | None = None,
        out: Path = Path(),
        rows: Sequence[str] | None = None,
    ) -> list[Cell]:
        """Return all runs, or those of some columns, seeds and rows, by falling cost.

        Runs that follow another come last. A column that a chosen column follows is chosen too.
        """
        for name in rows or ():
            check_choice("rows", name, self.rows)
        chosen_rows = {name: row for name, row in self.rows.items() if name in (rows or self.rows)}
        for column in only or ():
            check_choice("columns", column, replace(self, rows=chosen_rows).columns)
        seeds = list(dict.fromkeys(seeds or self.seeds))
        cells = []
        info = cache(find_info)  # a folder is listed, which takes long
        for name, row in chosen_rows.items():
            chosen = set(row.columns) & set(only or row.columns)
            chosen |= {row.columns[column].reference or column for column in chosen}
            leading = [column for column, each in row.columns.items() if each.reference is None]
            for column, seed in product(row.columns, seeds):
                if column not in chosen:
                    continue
                recipe = replace(row.columns[column], seed=seed)
                if recipe.reference is not None:
                    check_choice("reference", recipe.reference, leading)
                    reference = out.resolve() / name / recipe.reference / f"seed-{seed}"
                    recipe = replace(recipe, reference=str(reference))
                samples = info(recipe.data, recipe.image_size, recipe.holdout).samples
                plan = _plan(recipe, samples, f"{name} {column}")
                cells.append(Cell(name, column, plan, self.evaluations))
        return sorted(cells, key=lambda cell: (cell.recipe.hold == "distance", -cell.cost))

    def instruments_of(self, cells: Sequence[Cell]) -> list[Instrument]:
        """Return the instruments without a recipe, and those whose recipe is that of a cell."""
        recipes = [None, *(cell.recipe for cell in cells)]
        return [each for each in self.instruments if each.recipe in recipes]


def _plan(recipe: Recipe, samples: int, cell: str) -> Plan:
    """Return the plan of a cell; an error names the cell."""
    try:
        return recipe.plan(samples)
    except InputError as error:
        remedy = f"{error.remedy}, or leave the cell out by --rows or --columns"
        raise InputError(error.field, f"{cell}: {error.problem}", remedy) from None
