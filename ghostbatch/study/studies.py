"""The studies, declared: rows and columns of recipes, and instruments."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import accumulate
from pathlib import Path

from ghostbatch.data import find_info
from ghostbatch.errors import InputError
from ghostbatch.optim import Regime
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

    @property
    def follows(self) -> bool:
        """Whether it needs another run's distances, so that run's end."""
        return self.recipe.hold == "distance"

    def folder(self, out: Path) -> Path:
        """Where the run lives in a study's folder."""
        return out / self.row / self.column / f"seed-{self.recipe.seed}"


Rows = dict[str, dict[str, Recipe]]
"""By the name of the row and that of the column; each is run with every seed."""


@dataclass(frozen=True)
class Study:
    """Rows of runs, and instruments that measure what runs do not."""

    name: str
    rows: Rows = field(default_factory=dict)
    """With hold "distance", the reference names the column whose run of the same seed to follow."""
    seeds: tuple[int, ...] = (0, 1, 2)
    instruments: tuple[str, ...] = ()
    """Names in `ghostbatch.study.instruments`."""

    @property
    def columns(self) -> list[str]:
        """Every column of any row."""
        return list(dict.fromkeys(column for row in self.rows.values() for column in row))

    def cells(
        self,
        only: Sequence[str] | None = None,
        seeds: Sequence[int] | None = None,
        out: Path = Path(),
    ) -> list[Cell]:
        """All runs, or those of some columns and seeds; the longest first, followers last."""
        for column in only or ():
            if column not in self.columns:
                known = ", ".join(self.columns)
                remedy = f"choose from {known}" if known else f"leave it out: {self.name} has none"
                raise InputError("columns", f"{column!r} is unknown", remedy)
        cells = []
        for row, recipes in self.rows.items():
            for column, recipe in recipes.items():
                if only is None or column in only or _is_followed(column, recipes, only):
                    for seed in seeds or self.seeds:
                        cells.append(_cell(row, column, replace(recipe, seed=seed), out))
        return sorted(cells, key=lambda cell: (cell.follows, -cell.cost))


def _is_followed(column: str, row: dict[str, Recipe], only: Sequence[str]) -> bool:
    """Whether one of the columns asked for needs this one."""
    return any(row[name].reference == column for name in only if name in row)


def _cell(row: str, column: str, recipe: Recipe, out: Path) -> Cell:
    if recipe.reference is not None:
        theirs = out.resolve() / row / recipe.reference / f"seed-{recipe.seed}"
        recipe = replace(recipe, reference=str(theirs))
    return Cell(row, column, recipe.plan(find_info(recipe.data).samples))


def paper_row(recipe: Recipe, large: int, ghost: int) -> dict[str, Recipe]:
    """A row of the paper's tables: its columns, each the one before plus one change."""
    steps = columns(large, ghost)
    recipes = accumulate(steps.values(), lambda r, step: step(r), initial=recipe)
    next(recipes)  # the row before any column
    return dict(zip(steps, recipes, strict=True))


def quick() -> Study:
    """The paper's five columns in small: F1 on the embedded digits, batch 32 against 1024.

    Command: ``ghostbatch study quick``.
    Expected: SB 94.4, LB 83.5, +LR 92.3, +GBN 93.3, +RA 95.9 %, each within 0.6 over seeds.
    Cost: 2 minutes on two cores, most of it for +RA, which sees the data 128 times.
    """
    return Study("quick", {"f1-digits": paper_row(find_recipe("f1-digits"), large=1024, ghost=32)})


def walk() -> Study:
    """The theory by itself: walkers on a rough line, which get (log t)^2 far, and on a flat one.

    Command: ``ghostbatch study walk``.
    Expected: exponents of log t near 2 on the rough line, and sqrt t on the flat one.
    Cost: seconds.
    """
    return Study("walk", instruments=("walk",))


def separable() -> Study:
    """Logistic regression on separable data: w(t) grows as log t times the hard-margin vector.

    Command: ``ghostbatch study separable``.
    Expected: w(t) / log t approaches a vector, and the gap of its margin shrinks as 1 / log t.
    Cost: seconds.
    """
    return Study("separable", instruments=("separable",))


def diffusion() -> Study:
    """How far weights walk, in small: figures 2, B and C2 of the paper, and its title's claim.

    Command: ``ghostbatch study diffusion``.
    Rows: distance by batch size before and after +LR and +GBN; the same without weight decay; the
    scaled rate against noise; the drop by distance against +RA; the first phase from a quarter to
    four times as long, with the same tail. Then the loss around the initial weights.
    """
    base = find_recipe("f1-digits")
    high = replace(base, regime=Regime(lr=base.regime.lr, epochs=16))
    still = replace(high, regime=replace(high.regime, weight_decay=0.0))
    sizes = (32, 128, 512, 1024)

    def adapted(recipe: Recipe, batch: int) -> Recipe:
        return replace(recipe, batch=batch, lr_rule="sqrt", ghost=min(32, batch))

    large = replace(base, batch=256, lr_rule="sqrt", ghost=32)
    dropped = replace(
        base, batch=1024, regime=Regime(lr=base.regime.lr, epochs=16, drops=((8, 0.005),))
    )
    rows: Rows = {
        "before": {f"batch {size}": replace(high, batch=size) for size in sizes},
        "after": {f"batch {size}": adapted(high, size) for size in sizes},
        "no weight decay": {f"batch {size}": replace(still, batch=size) for size in (32, 1024)},
        "rate or noise": {
            "scaled rate": replace(dropped, lr_rule="sqrt"),
            "noise": replace(dropped, noise=True),
        },
        "by distance": {
            "SB": base,
            "+RA": replace(large, hold="updates"),
            "by distance": replace(large, hold="distance", reference="SB"),
        },
        "longer": {
            f"x {float(factor):g}": replace(base, regime=_longer(base.regime, factor))
            for factor in (Fraction(1, 4), Fraction(1, 2), 1, 2, 4)
        },
    }
    return Study("diffusion", rows, instruments=("potential",))


def _longer(regime: Regime, factor: Fraction | int) -> Regime:
    """The first phase so many times as long, and the same phases after it."""
    shift = Fraction(regime.drops[0][0]) * (factor - 1)
    drops = tuple((Fraction(epoch) + shift, *rates) for epoch, *rates in regime.drops)
    return replace(regime, epochs=Fraction(regime.epochs) + shift, drops=drops)  # type: ignore[arg-type]


STUDIES: dict[str, Callable[[], Study]] = {
    "quick": quick,
    "diffusion": diffusion,
    "walk": walk,
    "separable": separable,
}


def find_study(name: str) -> Study:
    """The study of that name."""
    if name not in STUDIES:
        raise InputError("study", f"{name!r} is unknown", f"choose one of {', '.join(STUDIES)}")
    return STUDIES[name]()
