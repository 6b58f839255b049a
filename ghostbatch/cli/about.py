"""What the help of a command says above its flags."""

import inspect
import re
import shutil
import textwrap
from collections.abc import Callable, Mapping
from typing import Any

Table = Mapping[str, Callable[..., Any]]


def about_one(kind: type, name: str, table: Table, *more: str) -> str:
    """Return the docstrings of a command's options and of the recipe or study that it runs."""
    text = (inspect.getdoc(table[name]) or "").replace("``", "")
    first, *facts = re.split(r"\n+(?=[A-Z][\w ]*: )|\n\n", text)  # Command: ... Cost: ...
    return _wrapped(f"{kind.__doc__}", f"{name}: {first}", *facts, *more)


def about_all(kind: type, what: str, table: Table, *more: str) -> str:
    """Return the docstring of a command's options, and the names that it takes."""
    names = ", ".join(table)
    listed = f"{what} is one of {names}; ghostbatch list describes them."
    return _wrapped(f"{kind.__doc__}", listed, *more)


def _wrapped(*lines: str) -> str:
    """Wrap each line at the terminal's width.

    The parser keeps the breaks before lines that begin with a space.
    """
    width = shutil.get_terminal_size().columns
    wrapper = textwrap.TextWrapper(
        width, initial_indent=" ", subsequent_indent="   ", break_on_hyphens=False
    )
    return "\n".join(part for line in lines for part in wrapper.wrap(" ".join(line.split())))
