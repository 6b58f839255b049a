"""Why our figures of table 1 differ from the paper's: one habit of its authors' code at a time."""

from dataclasses import replace
from typing import Any

from ghostbatch.recipe import Recipe
from ghostbatch.study.declare import Row, Study
from ghostbatch.study.paper import table1
from ghostbatch.study.rows import COLUMNS

NETWORKS = ("f1-mnist", "c1-cifar10", "resnet44-cifar10")


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
        for column in COLUMNS[:-1]:
            recipe = declared[network].columns[column]
            habits = _habits(recipe)
            everything = {name: value for habit in habits.values() for name, value in habit.items()}
            changes = {"as declared": {}, **habits, "all of them": everything}
            columns = {name: replace(recipe, **change) for name, change in changes.items()}
            paper = dict.fromkeys(columns, declared[network].paper[column])
            rows[f"{network} {column}"] = Row(columns, paper=paper)
    return Study("controls", rows)


def _habits(recipe: Recipe) -> dict[str, dict[str, Any]]:
    """Return what the authors' code does and ``recipe`` does not: fields, by their column."""
    habits: dict[str, dict[str, Any]] = {
        "authors pixels": {"normalisation": "authors"},
        "momentum reset": {"reset_momentum": True},
    }
    if not recipe.augment:
        habits["augmented"] = {"augment": True}
    if recipe.lr_rule == "sqrt":
        habits["base batch 256"] = {"base_batch": 256}
    return habits
