"""The studies, declared: rows are recipes, columns the paper's remedies, one added at a time."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

from ghostbatch.data import find_info
from ghostbatch.errors import InputError
from ghostbatch.recipe import Plan, Recipe
from ghostbatch.study.recipes import find_recipe

Step = Callable[[Recipe], Recipe]


def columns(large: int, ghost: int) -> dict[str, Step]:
    """The paper's columns; each is the one before plus one change."""
    return {
        "SB": lambda r: r,
        "LB": lambda r: replace(r, batch=large),
        "+LR": lambda r: replace(r, lr_rule="sqrt"),
        "+GBN": lambda r: replace(r, ghost=ghost),
        "+RA": lambda r: replace(r, hold="updates"),
    }


@dataclass(frozen=True)
class Cell:
    """One run of a study, and its place in it."""

    row: str
    column: str
    plan: Plan

    @property
    def recipe(self) -> Recipe:
        """What the run does."""
        return self.plan.recipe

    @property
    def cost(self) -> float:
        """Work in samples; an update costs about 32 of them however small its batch."""
        return self.plan.updates * (self.recipe.batch + 32)

    def folder(self, out: Path) -> Path:
        """Where the run lives in a study's folder."""
        return out / self.row / self.column / f"seed-{self.recipe.seed}"


@dataclass(frozen=True)
class Study:
    """Recipes by columns by seeds."""

    name: str
    rows: tuple[str, ...]
    large: int
    ghost: int
    seeds: tuple[int, ...] = (0, 1, 2)

    @property
    def columns(self) -> dict[str, Step]:
        """The changes, by the name of the column that adds them."""
        return columns(self.large, self.ghost)

    def cells(
        self, only: Sequence[str] | None = None, seeds: Sequence[int] | None = None
    ) -> list[Cell]:
        """All runs, or those of some columns and seeds; the longest first."""
        for column in only or ():
            if column not in self.columns:
                known = ", ".join(self.columns)
                raise InputError("columns", f"{column!r} is unknown", f"choose from {known}")
        cells = []
        for row in self.rows:
            recipe = find_recipe(row)
            samples = find_info(recipe.data).samples
            recipes = accumulate(self.columns.values(), lambda r, step: step(r), initial=recipe)
            next(recipes)  # the row before any column
            for column, adapted in zip(self.columns, recipes, strict=True):
                if only is None or column in only:
                    for seed in seeds or self.seeds:
                        plan = replace(adapted, seed=seed).plan(samples)
                        cells.append(Cell(row, column, plan))
        return sorted(cells, key=lambda cell: -cell.cost)


def quick() -> Study:
    """The paper's five columns in small: F1 on the embedded digits, batch 32 against 1024.

    Command: ``ghostbatch study quick``.
    Expected: SB 94.4, LB 83.5, +LR 92.3, +GBN 93.3, +RA 95.9 %, each within 0.6 over seeds.
    Cost: 2 minutes on two cores, most of it for +RA, which sees the data 128 times.
    """
    return Study("quick", rows=("f1-digits",), large=1024, ghost=32)


STUDIES: dict[str, Callable[[], Study]] = {"quick": quick}


def find_study(name: str) -> Study:
    """The study of that name."""
    if name not in STUDIES:
        raise InputError("study", f"{name!r} is unknown", f"choose one of {', '.join(STUDIES)}")
    return STUDIES[name]()
