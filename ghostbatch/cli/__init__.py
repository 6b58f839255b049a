"""The command line: parses and prints; decides nothing."""

import os
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import tyro
from rich.console import Console

from ghostbatch import __version__
from ghostbatch.cli.flags import parse
from ghostbatch.cli.plan import plan_command
from ghostbatch.cli.study import print_report, study_command
from ghostbatch.cli.train import train_command
from ghostbatch.data import DATASETS
from ghostbatch.errors import InputError, RankLocalError, RankLocalWarning
from ghostbatch.nn import MODELS
from ghostbatch.study import PROVISIONAL, RECIPES, STUDIES, WorkerDied
from ghostbatch.train import is_first

USAGE = """\
usage: ghostbatch COMMAND ...

  list                    the recipes, studies, networks and data sets
  plan RECIPE --batch N   a recipe adapted to another batch, next to the original
  train RECIPE            one run; every field of the recipe is a flag
  study STUDY             a table of the paper: recipes by columns by seeds
  report FOLDER           tables, figures and an HTML page from a folder of runs

ghostbatch COMMAND --help tells more. What is interrupted goes on when it is run again."""


def main() -> None:
    """Entry point of ``ghostbatch``."""
    signal.signal(signal.SIGTERM, _terminate)
    warnings.showwarning = _warn
    try:
        run(sys.argv[1:])
    except InputError as error:
        _fail(str(error), 2, own=isinstance(error, RankLocalError))
    except WorkerDied as error:
        _fail(str(error), 1)
    except KeyboardInterrupt:
        _fail("interrupted; run the same command again to continue", 130)
    except Terminated:
        _fail("terminated; run the same command again to continue", 143)
    except BrokenPipeError:  # whoever read our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None
    except OSError as error:
        _fail(f"{error.filename or 'file'}: {error.strerror}; free or choose another place", 1)


def run(argv: Sequence[str]) -> None:
    """Run one command."""
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE)
        return
    if argv[0] == "--version":
        print(f"ghostbatch {__version__}")
        return
    name, *rest = argv
    if name not in COMMANDS:
        raise InputError("command", f"{name!r} is unknown", f"choose one of {', '.join(COMMANDS)}")
    COMMANDS[name](rest)


class Terminated(BaseException):
    """SIGTERM came; like KeyboardInterrupt, nothing but `main` may catch it."""


def _terminate(_signal: int, _frame: FrameType | None) -> None:
    raise Terminated


def _fail(line: str, code: int, own: bool = False) -> None:
    if own or is_first():  # the others end for the same reason
        _say(line)
    raise SystemExit(code)


def _warn(message: Warning | str, *_: Any, **__: Any) -> None:
    """One line, as for errors."""
    if is_first() or isinstance(message, RankLocalWarning):
        _say(str(message))


def _say(line: str) -> None:
    """In one piece, unlike print: ranks share a terminal."""
    sys.stderr.write(f"ghostbatch: {line}\n")
    sys.stderr.flush()


# ---------------------------------------------------------------------------------------- list


def list_command(argv: Sequence[str]) -> None:
    """Print every name that the other commands take."""
    parse(_NoOptions, argv, "list")
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


@dataclass(frozen=True)
class _NoOptions:
    """The recipes, studies, networks and data sets."""


# -------------------------------------------------------------------------------------- report


@dataclass(frozen=True)
class _ReportOptions:
    """Tables, figures and an HTML page from a folder of runs."""

    folder: tyro.conf.Positional[Path]
    """The --out of a study or of a train."""


def report_command(argv: Sequence[str]) -> None:
    """Make the page again from the run folders alone."""
    print_report(parse(_ReportOptions, argv, "report").folder, Console())


COMMANDS: dict[str, Callable[[Sequence[str]], None]] = {
    "list": list_command,
    "plan": plan_command,
    "train": train_command,
    "study": study_command,
    "report": report_command,
}
