"""Kinds of rows: the same comparison for any recipe, which is given at its small batch."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

from ghostbatch.optim import Epochs
from ghostbatch.optim.regime import exact
from ghostbatch.recipe import Recipe
from ghostbatch.study.declare import FIGURES, Row

PAPER_NOTE = (
    "Each column is the one before plus one change: LB has a large batch, +LR scales the learning "
    "rate by the square root of the batch ratio, +GBN uses ghost batch norm, and +RA trains for as "
    "many updates as SB."
)


COLUMNS = ("SB", "LB", "+LR", "+GBN", "+RA")
"""The columns of the paper's tables."""


def paper_row(recipe: Recipe, large: int, ghost: int, paper: Sequence[float] = ()) -> Row:
    """Return a row of the paper's tables; ``paper`` has its accuracies in the columns' order."""
    steps: dict[str, Callable[[Recipe], Recipe]] = {  # each is the one before plus one change
        "SB": lambda r: r,
        "LB": lambda r: replace(r, batch=large),
        "+LR": lambda r: replace(r, lr_rule="sqrt"),
        "+GBN": lambda r: replace(r, ghost=ghost),
        "+RA": lambda r: replace(r, hold="updates"),
    }
    recipes = {}
    for column, step in steps.items():
        recipe = recipes[column] = step(recipe)
    return Row(recipes, note=PAPER_NOTE, paper=dict(zip(recipes, paper, strict=bool(paper))))


def by_size(recipe: Recipe, sizes: Sequence[int], figures: tuple[str, ...] = FIGURES) -> Row:
    """Return a row of batch sizes; where ghosts would be larger than the batch, they are as large.

    >>> from ghostbatch.recipes import find_recipe
    >>> row = by_size(replace(find_recipe("f1-mnist"), ghost=128), (64, 256))
    >>> {column: recipe.ghost for column, recipe in row.columns.items()}
    {'batch 64': 64, 'batch 256': 128}
    """
    columns = {}
    for size in sizes:
        ghost = None if recipe.ghost is None else min(recipe.ghost, size)
        columns[f"batch {size}"] = replace(recipe, batch=size, ghost=ghost)
    return Row(columns, figures)


def rate_or_noise(recipe: Recipe, large: int) -> Row:
    """Return a large batch with a scaled rate and with noise, and two controls.

    The controls are the large batch without a remedy, and the small batch with as many updates:
    noise imitates the covariance of the small batch's gradients, so it should do as well as that.
    """
    large_batch = replace(recipe, batch=large)
    short = recipe.regime.stretched(Fraction(recipe.batch, large))
    columns = {
        "SB same updates": replace(recipe, regime=short),
        "LB": large_batch,
        "scaled rate": replace(large_batch, lr_rule="sqrt"),
        "noise": replace(large_batch, noise=True),
    }
    note = (
        "All columns have the same number of updates. Noise gives the gradients of LB the "
        "covariance of the small batch's, so compare it with SB of the same updates."
    )
    return Row(columns, note=note)


def drop_by_distance(recipe: Recipe, large: int, ghost: int) -> Row:
    """Return a large batch whose rate drops at the updates of SB, and one at its distances."""
    adapted = replace(recipe, batch=large, lr_rule="sqrt", ghost=ghost)
    columns = {
        "SB": recipe,
        "+RA": replace(adapted, hold="updates"),
        "by distance": replace(adapted, hold="distance", reference="SB"),
    }
    note = (
        "By distance, the rate drops when the weights have walked as far as those of SB had at its "
        "drop."
    )
    return Row(columns, note=note)


def longer_first_phase(recipe: Recipe, factors: Sequence[Fraction | int]) -> Row:
    """Return runs whose first phase is longer or shorter; their later phases are the same."""
    regime, columns = recipe.regime, {}
    for factor in factors:
        shift = exact(regime.drops[0][0]) * (factor - 1)
        drops: Any = tuple((exact(epoch) + shift, *rates) for epoch, *rates in regime.drops)
        longer = replace(regime, epochs=exact(regime.epochs) + shift, drops=drops)
        columns[f"x {float(factor):g}"] = replace(recipe, regime=longer)
    return Row(columns, figures=(*FIGURES, "accuracy-by-distance", "gain-at-drop"))


def warmed_up(recipe: Recipe, epochs: Epochs) -> Recipe:
    """Return the recipe with a warm-up."""
    return replace(recipe, regime=replace(recipe.regime, warmup=epochs))


def without_weight_decay(recipe: Recipe) -> Recipe:
    """Return the recipe without weight decay, which moves the weights by itself."""
    regime = recipe.regime
    drops = tuple((epoch, lr) for epoch, lr, *_ in regime.drops)
    return replace(recipe, regime=replace(regime, weight_decay=0.0, drops=drops))
