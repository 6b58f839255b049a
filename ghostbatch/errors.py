"""The exception that wrong input raises: one line with the field, the problem and a remedy."""

from collections.abc import Collection
from difflib import get_close_matches
from fractions import Fraction
from math import isfinite


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


def check_choice(field: str, value: str, choices: Collection[str], *more: str) -> None:
    """Refuse a value that is not one of ``choices``; the remedy names ``more``, too."""
    if value not in choices:
        close = get_close_matches(str(value), choices, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        remedy = f"{hint}choose one of {', '.join((*choices, *more))}"
        raise InputError(field, f"{value!r} is unknown", remedy)


def check_positive(**numbers: int | Fraction | None) -> None:
    """Raise `InputError` if a number is below 1; None is allowed."""
    for name, value in numbers.items():
        if value is not None and value < 1:
            raise InputError(name, f"{value} is below 1", "use 1 or more")


def check_seconds(**times: float) -> None:
    """Raise `InputError` if a time is not a finite number of seconds, 0 or more."""
    for name, value in times.items():
        if not (isfinite(value) and value >= 0):
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
