"""The exception that wrong input raises: one line with the field, the problem and a remedy."""

from collections.abc import Collection
from difflib import get_close_matches
from fractions import Fraction
from functools import cache
from math import isfinite
from numbers import Integral
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints


class InputError(ValueError):
    """Raised when a value that the user gave cannot be used.

    The message is always one line, ``field: problem; remedy``. The command line prints it and
    exits with code 2; in a notebook it is an ordinary ``ValueError``.

    >>> str(InputError("batch", "1 is below 2", "use 2 or more"))
    'batch: 1 is below 2; use 2 or more'
    """

    def __init__(self, field: str, problem: str, remedy: str) -> None:
        super().__init__(f"{field}: {problem}; {remedy}")
        self.field, self.problem, self.remedy = field, problem, remedy

    def __reduce__(self) -> tuple[type["InputError"], tuple[str, str, str]]:
        """Pickle the three parts; by default pickle would pass the whole line as one argument."""
        return type(self), (self.field, self.problem, self.remedy)


def portable(error: InputError | OSError) -> InputError | OSError:
    """Return an error that other processes can unpickle, which those of some libraries cannot."""
    if isinstance(error, InputError):
        return error
    return OSError(error.errno, error.strerror or str(error), error.filename)


def one_line(what: object) -> str:
    """Return a text without line breaks."""
    return " ".join(str(what).split())


def check_choice(field: str, value: str, choices: Collection[str], *more: str) -> None:
    """Refuse a value that is not one of ``choices``; the remedy names ``more``, too."""
    if not (isinstance(value, str) and value in choices):
        close = get_close_matches(str(value), choices, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        remedy = f"{hint}choose one of {', '.join((*choices, *more))}"
        raise InputError(field, f"{value!r} is unknown", remedy)


TYPES = {
    bool: "True or False",
    int: "a whole number",
    float: "a number",
    Fraction: "a fraction",
    str: "text",
    NoneType: "None",
}
"""What values of a type are called."""

_hints = cache(get_type_hints)


def check_types(record: Any, prefix: str = "") -> None:
    """Refuse a value of a dataclass that is not of its field's type, or not one of a Literal.

    Fields of one class, and of a choice of `TYPES`, are checked; tuples, for example, are not.
    """
    kind: Any = type(record)
    for name, hint in _hints(kind).items():
        value = getattr(record, name)
        if get_origin(hint) is Literal:
            check_choice(f"{prefix}{name}", value, get_args(hint))
            continue
        kinds = get_args(hint) or (hint,)
        known = all(kind in TYPES for kind in kinds) or isinstance(hint, type)
        if known and not any(_is_a(value, kind) for kind in kinds):
            kinds = tuple(kind for kind in kinds if kind is not int or float not in kinds)
            wanted = " or ".join(TYPES.get(kind, f"a {kind.__name__}") for kind in kinds)
            raise InputError(f"{prefix}{name}", f"{value!r} is not {wanted}", "give one")


def _is_a(value: Any, kind: type) -> bool:
    """Return whether a value has a type; a bool is no number, and a whole number is a number."""
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, int | float if kind is float else kind)


def check_is(field: str, value: object, kind: type | tuple[type, ...], what: str) -> None:
    """Refuse a value of another type; ``what`` says what was wanted, such as "a path"."""
    if not isinstance(value, kind):
        raise InputError(field, f"this {type(value).__name__} is not {what}", "give one")


def check_positive(**numbers: int | Fraction) -> None:
    """Raise `InputError` if a number is below 1 or not whole; fractions are allowed."""
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, Integral | Fraction):
            raise InputError(name, f"{value!r} is not a whole number", "use 1 or more")
        if value < 1:
            raise InputError(name, f"{value} is below 1", "use 1 or more")


def check_positive_or_none(**numbers: int | Fraction | None) -> None:
    """Raise `InputError` if a number that is given is below 1 or not whole."""
    check_positive(**{name: value for name, value in numbers.items() if value is not None})


def check_seconds(**times: float) -> None:
    """Raise `InputError` if a time is not a finite number of seconds, 0 or more."""
    for name, value in times.items():
        if not (isinstance(value, int | float) and isfinite(value) and value >= 0):
            raise InputError(name, f"{value} is not a time", "use a number of seconds, 0 or more")


class RankLocalError(InputError):
    """An error that only some ranks may meet; each of them reports it, not only rank 0."""


class RankLocalWarning(UserWarning):
    """A warning that only some ranks may meet; each of them shows it, not only rank 0."""


class RankError(RuntimeError):
    """Raised where ranks that must act together do not: one does something else, or is lost.

    The message is one line. The command line prints it on every rank that meets it and exits with
    code 1.
    """
