"""``ghostbatch list``: every name that the other commands take."""

from collections.abc import Sequence
from dataclasses import dataclass

from ghostbatch.cli.flags import parse
from ghostbatch.data import DATASETS
from ghostbatch.nn import MODELS
from ghostbatch.recipes import PROVISIONAL, RECIPES
from ghostbatch.study import STUDIES


@dataclass(frozen=True)
class NoOptions:
    """Print the recipes, studies, networks and data sets."""


def command(argv: Sequence[str]) -> None:
    """Print each name with the first line of its docstring."""
    parse(NoOptions, argv, "list")
    tables = (
        ("recipes", RECIPES),
        ("studies", STUDIES),
        ("networks", MODELS),
        ("data sets", DATASETS),
    )
    width = max(len(name) for _, table in tables for name in table)
    for title, table in tables:
        print(title)
        for name, make in table.items():
            line = (make.__doc__ or "").strip().split("\n")[0]
            print(f"  {name:<{width}} {line}{' (provisional)' if name in PROVISIONAL else ''}")
