"""``ghostbatch list``: every name that the other commands take."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ghostbatch.cli.flags import parse
from ghostbatch.data import DATASETS, find_info
from ghostbatch.nn import MODELS
from ghostbatch.recipes import RECIPES
from ghostbatch.study import STUDIES, Cost

TIME = "time on this machine: ghostbatch train RECIPE --dry-run, ghostbatch study STUDY --dry-run"


@dataclass(frozen=True)
class ListOptions:
    """Print the recipes, studies, networks and data sets."""

    json: bool = False
    """Print JSON instead of lines."""


def command(argv: Sequence[str]) -> None:
    """Print each name with what it costs and the first line of its docstring."""
    options = parse(ListOptions, argv, "list")
    tables: dict[str, list[dict[str, Any]]] = {
        "recipes": [_recipe(name) for name in RECIPES],
        "studies": [_study(name) for name in STUDIES],
        "networks": [_entry(name, MODELS) for name in MODELS],
        "data_sets": [_entry(name, DATASETS) for name in DATASETS],
    }
    if options.json:
        print(json.dumps(tables, indent=2))
        return
    width = max(len(entry["name"]) for table in tables.values() for entry in table)
    for title, table in tables.items():
        print(title.replace("_", " "))
        for entry in table:
            print(f"  {entry['name']:<{width}} {_cost(entry)}{entry['about']}")
    print(f"\n{TIME}")


def _entry(name: str, table: Mapping[str, Callable[..., Any]]) -> dict[str, Any]:
    """Return a name and the first line of its docstring."""
    return {"name": name, "about": (table[name].__doc__ or "").strip().split("\n")[0]}


def _recipe(name: str) -> dict[str, Any]:
    recipe = RECIPES[name]()
    updates = recipe.plan(find_info(recipe.data).samples).updates
    return {**_entry(name, RECIPES), "updates": updates, "images": updates * recipe.batch}


def _study(name: str) -> dict[str, Any]:
    cost = Cost(STUDIES[name]().cells())
    counts = {"runs": len(cost.cells), "updates": cost.updates, "images": cost.images}
    return {**_entry(name, STUDIES), **counts}


def _cost(entry: Mapping[str, Any]) -> str:
    """Return the updates and images of a recipe or a study, and a study's runs, as text."""
    if "updates" not in entry:
        return ""
    cost = f"{entry['updates']:>9,} updates {entry['images']:>14,} images  "
    if "runs" not in entry:
        return cost
    cost = f"{entry['runs']:>4,} {'run ' if entry['runs'] == 1 else 'runs'} {cost}"
    return cost if entry["runs"] else f"{'no training runs':<{len(cost)}}"
