"""Lines on stderr: errors, what the package logs, and what a slow start waits for."""

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Timer

LOGGER = logging.getLogger("ghostbatch")
SLOW = 1.0
"""Seconds after which a command says that it is still starting."""


def say(line: str) -> None:
    """Write a line to stderr with one call, unlike print, because ranks share a terminal."""
    sys.stderr.write(f"ghostbatch: {line}\n")
    sys.stderr.flush()


def is_first_rank() -> bool:
    """Return whether this process is the first rank, or the only one."""
    return os.environ.get("RANK", "0") == "0"


class LogLines(logging.Handler):
    """Shows log records as lines on stderr: on the first rank, and each text once.

    Several workers of a study may log the same.
    """

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._shown: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        """Show a record, unless it has been shown."""
        line = record.getMessage()
        if is_first_rank() and line not in self._shown:
            self._shown.add(line)
            say(line)


@contextmanager
def log_shown() -> Iterator[None]:
    """Show what the package logs, from level INFO on."""
    handler, level = LogLines(), LOGGER.level
    LOGGER.addHandler(handler)
    LOGGER.setLevel(logging.INFO)
    try:
        yield
    finally:
        LOGGER.removeHandler(handler)
        LOGGER.setLevel(level)


@contextmanager
def said_if_slow(line: str) -> Iterator[None]:
    """Say a line if what follows takes more than `SLOW` seconds, in a terminal only.

    How long a start takes depends on the machine, and a log file is to be the same everywhere.
    """
    timer = Timer(SLOW, say, [line])
    timer.daemon = True
    if is_first_rank() and sys.stderr.isatty():
        timer.start()
    try:
        yield
    finally:
        timer.cancel()
