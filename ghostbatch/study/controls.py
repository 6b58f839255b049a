"""Why our figures of table 1 differ from the paper's: one habit of its authors' code at a time."""

from collections.abc import Callable
from dataclasses import replace

from ghostbatch.recipe import Recipe
from ghostbatch.study.declare import Row, Study
from ghostbatch.study.paper import table1

NETWORKS = ("f1-mnist", "c1-cifar10", "resnet44-cifar10")
COLUMNS = ("SB", "LB", "+LR", "+GBN")


def controls() -> Study:
    """Columns of table 1 with one habit of the authors' code at a time, and with all of them.

    Command: ``ghostbatch study controls``.
    Compares, in each row, a column of table 1 as it is with: their normalisation of pixels;
    momentum that starts again at each epoch, because their loop rebuilds the optimizer; random
    crops and flips of digits; a base batch of 256, for columns whose rate is scaled; all of these.
    Question: which of them explains a difference from the paper that is larger than the spread over
    seeds plus 0.5 points? None of these settings is taken over into a recipe.
    Expected: docs/results.md, of the rows that were run.
    Cost: 426 million images per seed.
    """
    rows = {}
    declared = table1().rows
    for network in NETWORKS:
        for column in COLUMNS:
            recipe = declared[network].columns[column]
            columns = {"as declared": recipe}
            for name, change in _habits(recipe).items():
                columns[name] = change(recipe)
            columns["all of them"] = recipe
            for change in _habits(recipe).values():
                columns["all of them"] = change(columns["all of them"])
            paper = dict.fromkeys(columns, declared[network].paper[column])
            rows[f"{network} {column}"] = Row(columns, paper=paper)
    return Study("controls", rows)


def _habits(recipe: Recipe) -> dict[str, Callable[[Recipe], Recipe]]:
    """Return what the authors' code does and ``recipe`` does not, by the name of its column."""
    habits: dict[str, Callable[[Recipe], Recipe]] = {
        "authors pixels": lambda r: replace(r, normalisation="authors"),
        "momentum reset": lambda r: replace(r, reset_momentum=True),
    }
    if not recipe.augment:
        habits["augmented"] = lambda r: replace(r, augment=True)
    if recipe.lr_rule == "sqrt":
        habits["base batch 256"] = lambda r: replace(r, base_batch=256)
    return habits
