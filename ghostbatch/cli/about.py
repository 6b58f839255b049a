"""What the help of a command says above its flags."""

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

Table = Mapping[str, Callable[[], Any]]


def about_one(does: str | None, name: str, table: Table) -> str:
    """Return what a command does, and the docstring of the recipe or the study that it runs.

    The parser joins the lines of a paragraph; so command, figures and cost begin a new one each.
    """
    text = (inspect.getdoc(table[name]) or "").replace("``", "")
    return f"{does}\n\n{name}: " + re.sub(r"\n+(?=[A-Z][\w ]*: )", "\n\n", text)


def about_all(does: str | None, what: str, table: Table, more: str) -> str:
    """Return what a command does, and the names that it takes."""
    names = ", ".join(table)
    return f"{does}\n\n{what} is one of {names}; ghostbatch list describes them.\n\n{more}"
