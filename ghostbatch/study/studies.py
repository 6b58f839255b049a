"""The studies, declared: rows and columns of recipes, and instruments."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cache, cached_property
from pathlib import Path

from ghostbatch.data import find_info
from ghostbatch.errors import check_choice
from ghostbatch.optim import Regime
from ghostbatch.recipe import Plan, Recipe
from ghostbatch.recipes import find_recipe
from ghostbatch.study.instruments import Instrument

Step = Callable[[Recipe], Recipe]

FIGURES = ("error-by-update", "error-by-epoch", "distance")
"""Figures of a row that names no others; `ghostbatch.report.figures` has all kinds."""

PAPER_NOTE = (
    "Each column is the one before plus one change: LB has a large batch, +LR scales the learning "
    "rate by the square root of the batch ratio, +GBN uses ghost batch norm, and +RA trains for as "
    "many updates as SB."
)


def columns(large: int, ghost: int) -> dict[str, Step]:
    """Return the paper's columns; each is the one before plus one change."""
    return {
        "SB": lambda r: r,
        "LB": lambda r: replace(r, batch=large),
        "+LR": lambda r: replace(r, lr_rule="sqrt"),
        "+GBN": lambda r: replace(r, ghost=ghost),
        "+RA": lambda r: replace(r, hold="updates"),
    }


@dataclass(frozen=True)
class Cell:
    """One run of a study, and its place in the table."""

    row: str
    column: str
    plan: Plan

    @property
    def recipe(self) -> Recipe:
        """What the run computes."""
        return self.plan.recipe

    @property
    def name(self) -> str:
        """What messages call the run."""
        return f"{self.row} {self.column} seed {self.recipe.seed}"

    def __hash__(self) -> int:
        """Hash the place in the table; hashing the whole plan takes long."""
        return hash((self.row, self.column, self.recipe.seed))

    @cached_property
    def cost(self) -> float:
        """Estimated work in samples: each update costs its batch plus an overhead of about 32."""
        return self.plan.updates * (self.recipe.batch + 32)

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

    @property
    def columns(self) -> list[str]:
        """Every column of any row."""
        return list(dict.fromkeys(column for row in self.rows.values() for column in row.columns))

    def cells(
        self,
        only: Sequence[str] | None = None,
        seeds: Sequence[int] | None = None,
        out: Path = Path(),
    ) -> list[Cell]:
        """Return all runs, or those of some columns and seeds, by falling cost.

        Runs that follow another come last. A column that a chosen column follows is chosen too.
        """
        for column in only or ():
            check_choice("columns", column, self.columns)
        cells = []
        info = cache(find_info)  # a folder is listed, which takes long
        for name, row in self.rows.items():
            chosen = set(row.columns) & set(only or row.columns)
            chosen |= {row.columns[column].reference or column for column in chosen}
            for column in (column for column in row.columns if column in chosen):
                for seed in seeds or self.seeds:
                    recipe = replace(row.columns[column], seed=seed)
                    if recipe.reference is not None:
                        reference = out.resolve() / name / recipe.reference / f"seed-{seed}"
                        recipe = replace(recipe, reference=str(reference))
                    plan = recipe.plan(info(recipe.data, recipe.image_size).samples)
                    cells.append(Cell(name, column, plan))
        return sorted(cells, key=lambda cell: (cell.recipe.hold == "distance", -cell.cost))


def paper_row(recipe: Recipe, large: int, ghost: int) -> Row:
    """Return a row of the paper's tables, with its columns."""
    recipes = {}
    for column, step in columns(large, ghost).items():
        recipe = recipes[column] = step(recipe)
    return Row(recipes, note=PAPER_NOTE)


def quick() -> Study:
    """The paper's five columns in small: F1 on the embedded digits, batch 32 against 1024.

    Command: ``ghostbatch study quick``.
    Expected: SB 94.2, LB 83.5, +LR 92.3, +GBN 93.3, +RA 95.8 %, each within 0.6 over seeds. Other
    processors round differently: one had SB 94.4 and +GBN 93.2 %.
    Cost: 2:22 minutes on two cores, most of it for +RA, which sees the data 128 times.
    """
    return Study("quick", {"f1-digits": paper_row(find_recipe("f1-digits"), large=1024, ghost=32)})


def walk() -> Study:
    """Random walkers on a rough line, where distance grows as (log t)^2, and on a flat one.

    Command: ``ghostbatch study walk``.
    Expected: exponents of log t near 2 on the rough line, and sqrt t on the flat one.
    Cost: seconds.
    """
    return Study("walk", instruments=(Instrument("walk"),))


def separable() -> Study:
    """Logistic regression on separable data: w(t) grows as log t times the hard-margin vector.

    Command: ``ghostbatch study separable``.
    Expected: w(t) / log t approaches a vector, and the gap of its margin shrinks as 1 / log t.
    Cost: seconds.
    """
    return Study("separable", instruments=(Instrument("separable"),))


def diffusion() -> Study:
    """How far weights walk, in small: figures 2, B and C2 of the paper, and its title's claim.

    Command: ``ghostbatch study diffusion``.
    Rows: distance by batch size before and after +LR and +GBN; the same without weight decay; the
    scaled rate against noise; drops decided by distance against +RA; the first phase from a quarter
    to four times as long, with the same later phases. Instrument: the loss around the initial
    weights.
    Expected: docs/diffusion.md.
    Cost: about 18 minutes on two idle cores.
    """
    base = find_recipe("f1-digits")
    high = replace(base, regime=Regime(lr=base.regime.lr, epochs=16))
    undecayed = replace(high, regime=replace(high.regime, weight_decay=0.0))
    dropped = replace(high, batch=1024, regime=replace(high.regime, drops=((8, 0.005),)))
    large = replace(base, batch=256, lr_rule="sqrt", ghost=32)
    adapted = replace(high, lr_rule="sqrt", ghost=32)
    sizes = (8, 32, 128, 512, 1024)
    factors = (Fraction(1, 4), Fraction(1, 2), 1, 2, 4)

    def by_size(recipe: Recipe, sizes: Sequence[int]) -> Row:
        ghosts = {size: recipe.ghost and min(recipe.ghost, size) for size in sizes}
        return Row({f"batch {b}": replace(recipe, batch=b, ghost=g) for b, g in ghosts.items()})

    longer = {f"x {float(by):g}": replace(base, regime=_longer(base.regime, by)) for by in factors}
    rows = {
        "before": by_size(high, sizes),
        "after": by_size(adapted, sizes),
        "no weight decay": by_size(undecayed, (32, 1024)),
        "rate or noise": Row(
            {
                "scaled rate": replace(dropped, lr_rule="sqrt"),
                "noise": replace(dropped, noise=True),
            }
        ),
        "by distance": Row(
            {
                "SB": base,
                "+RA": replace(large, hold="updates"),
                "by distance": replace(large, hold="distance", reference="SB"),
            }
        ),
        "longer": Row(longer, figures=(*FIGURES, "accuracy-by-distance")),
    }
    return Study("diffusion", rows, instruments=(Instrument("potential", base),))


def _longer(regime: Regime, factor: Fraction | int) -> Regime:
    """Multiply the length of the first phase by a factor; the later phases keep theirs."""
    shift = Fraction(regime.drops[0][0]) * (factor - 1)
    drops = tuple((Fraction(epoch) + shift, *rates) for epoch, *rates in regime.drops)
    return replace(regime, epochs=Fraction(regime.epochs) + shift, drops=drops)  # type: ignore[arg-type]


STUDIES: dict[str, Callable[[], Study]] = {
    make.__name__: make for make in (quick, diffusion, walk, separable)
}


def find_study(name: str) -> Study:
    """Return the study of that name; refuse an unknown name."""
    check_choice("study", name, STUDIES)
    return STUDIES[name]()
