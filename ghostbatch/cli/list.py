"""``ghostbatch list``: every name that the other commands take."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ghostbatch.cli.flags import parse
from ghostbatch.data import DATASETS
from ghostbatch.nn import MODELS
from ghostbatch.study import PROVISIONAL, RECIPES, STUDIES


@dataclass(frozen=True)
class NoOptions:
    """Print the recipes, studies, networks and data sets."""


def command(argv: Sequence[str]) -> None:
    """Print each name with the first line of its docstring."""
    parse(NoOptions, argv, "list")
    described = (
        ("recipes", {name: _recipe_line(name) for name in RECIPES}),
        ("studies", {name: _first_line(make) for name, make in STUDIES.items()}),
        ("networks", {name: _first_line(make) for name, make in MODELS.items()}),
        ("data sets", {name: _first_line(make) for name, make in DATASETS.items()}),
    )
    width = max(len(name) for _, entries in described for name in entries)
    for title, entries in described:
        print(title)
        for name, line in entries.items():
            print(f"  {name:<{width}} {line}")


def _recipe_line(name: str) -> str:
    mark = " (provisional)" if name in PROVISIONAL else ""
    return _first_line(RECIPES[name]) + mark


def _first_line(thing: Callable[..., Any]) -> str:
    return (thing.__doc__ or "").strip().split("\n")[0]
