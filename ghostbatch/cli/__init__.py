"""The command line: parses and prints; decides nothing.

Each command is a module here, imported when it is used. So ``--version`` and ``--help`` do not
import torch, and only commands that draw import a plotting library.
"""

import os
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib import import_module
from types import FrameType
from typing import Any

from ghostbatch import __version__
from ghostbatch.errors import (
    InputError,
    RankError,
    RankLocalError,
    RankLocalWarning,
    check_choice,
)

COMMANDS = ("list", "plan", "train", "study", "report")
"""Modules of this package; each has a function ``command`` of its arguments."""

USAGE = """\
usage: ghostbatch COMMAND ...

  list                    print the recipes, studies, networks and data sets
  plan RECIPE --batch N   adapt a recipe to another batch, and print it next to the original
  train RECIPE            run one recipe; every field of the recipe is a flag
  study STUDY             run a table of the paper: recipes by columns by seeds
  report FOLDER           write tables, figures and an HTML page from a folder of runs

ghostbatch COMMAND --help prints the flags. Run an interrupted command again to continue it."""


def main() -> None:
    """Entry point of ``ghostbatch``."""
    warnings.showwarning = _warn
    try:
        run(sys.argv[1:])
    except InputError as error:
        fail(str(error), 2, every_rank=isinstance(error, RankLocalError))
    except RankError as error:
        _print_error(str(error))
        sys.stdout.flush()
        os._exit(1)  # an ordinary exit would wait for the lost rank once more
    except KeyboardInterrupt:
        fail("interrupted; run the same command again to continue", 130)
    except Terminated:
        fail("terminated; run the same command again to continue", 143)
    except BrokenPipeError:  # the reader of our output has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None
    except OSError as error:
        place = error.filename or "file"
        fail(f"{place}: {error.strerror}; free some space, or choose another folder", 1)


def run(argv: Sequence[str]) -> None:
    """Run one command."""
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE)
        return
    if argv[0] == "--version":
        print(f"ghostbatch {__version__}")
        return
    name, *rest = argv
    check_choice("command", name, COMMANDS)
    command = _load(name)
    signal.signal(signal.SIGTERM, _terminate)
    command(rest)


def _load(name: str) -> Callable[[Sequence[str]], None]:
    """Import a command; an interrupt meanwhile ends the process at once.

    Some libraries turn a KeyboardInterrupt during their import into an error that makes no sense.
    """
    usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if usual:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        return import_module(f"{__name__}.{name}").command  # type: ignore[no-any-return]
    finally:
        if usual:
            signal.signal(signal.SIGINT, signal.default_int_handler)


class Terminated(BaseException):
    """SIGTERM was received; like KeyboardInterrupt, only `main` catches it."""


def _terminate(_signal: int, _frame: FrameType | None) -> None:
    raise Terminated


def fail(line: str, code: int, every_rank: bool = False) -> None:
    """Print one line and exit; by default only on the first rank, as all fail alike."""
    if every_rank or is_first_rank():
        _print_error(line)
    raise SystemExit(code)


def is_first_rank() -> bool:
    """Return whether this process is the first rank, or the only one."""
    return os.environ.get("RANK", "0") == "0"


def _warn(message: Warning | str, *_: Any, **__: Any) -> None:
    """Print a warning as one line."""
    if is_first_rank() or isinstance(message, RankLocalWarning):
        _print_error(str(message))


def _print_error(line: str) -> None:
    """Write a line with one call, unlike print, because ranks share a terminal."""
    sys.stderr.write(f"ghostbatch: {line}\n")
    sys.stderr.flush()
