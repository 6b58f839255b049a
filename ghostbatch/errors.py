"""The one exception for wrong input: a line that names the field and the remedy."""


class InputError(ValueError):
    """Something the user gave cannot be used.

    The message is always one line, ``field: problem; remedy``. The command line prints it and
    exits with code 2; in a notebook it is an ordinary ``ValueError``.

    >>> str(InputError("batch", "1 is below 2", "use 2 or more"))
    'batch: 1 is below 2; use 2 or more'
    """

    def __init__(self, field: str, problem: str, remedy: str) -> None:
        super().__init__(f"{field}: {problem}; {remedy}")
        self.field, self.problem, self.remedy = field, problem, remedy

    def __reduce__(self) -> tuple[type["InputError"], tuple[str, str, str]]:
        """Rebuild from the parts: pickle would call the class with the whole line."""
        return type(self), (self.field, self.problem, self.remedy)


class RankLocalError(InputError):
    """What one rank may meet and the others not: each that does says so, not only the first."""


class RankLocalWarning(UserWarning):
    """The same for what does not end a run."""
