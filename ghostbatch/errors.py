"""The exception that wrong input raises: one line with the field, the problem and a remedy."""


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


class RankLocalError(InputError):
    """An error that only some ranks may meet; each of them reports it, not only rank 0."""


class RankLocalWarning(UserWarning):
    """A warning that only some ranks may meet; each of them shows it, not only rank 0."""
