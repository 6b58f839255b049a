"""The command line: parses and prints; decides nothing.

Each command is a module here, imported when it is used. So ``--version`` and ``--help`` do not
import torch, and only commands that draw import a plotting library.
"""

import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from types import FrameType
from typing import Any

from ghostbatch import __version__
from ghostbatch.cli.notices import is_first_rank, log_shown, said_if_slow, say
from ghostbatch.errors import (
    InputError,
    RankError,
    RankLocalError,
    RankLocalWarning,
    check_choice,
    one_line,
)
from ghostbatch.files import FULL_DISK
from ghostbatch.stop import STOP_SIGNALS

Command = Callable[[Sequence[str]], None]
COMMANDS = ("list", "plan", "train", "study", "report", "evaluate", "export", "advise")
"""Modules of this package; each has a function ``command`` of its arguments."""

USAGE = """\
usage: ghostbatch COMMAND ...

  list                    print the recipes, studies, networks and data sets
  plan RECIPE --batch N   adapt a recipe to another batch, and print it next to the original
  train RECIPE            run one recipe; every field of the recipe is a flag
  train --from FOLDER     run the recipe of an earlier run again
  study STUDY             run a table or a figure of the paper: recipes by columns by seeds
  study columns RECIPE    run the paper's five columns for a recipe
  report FOLDER           write tables, figures and an HTML page from a folder of runs
  evaluate RUN            print loss and accuracy of a run's network on its test set
  export RUN --to FILE    write a run's network as a state_dict, torch.export or ONNX file
  advise --batch N ...    print what to change in your own script for batch N, and why

ghostbatch COMMAND --help prints the flags. Run an interrupted command again to continue it.
Exit codes: 0 done, 1 failed, 2 wrong input, 3 train diverged, 128 + N stopped by signal N."""

DIVERGED = 3
"""Exit code of ``train`` when the run diverged; a study reports such a run and goes on."""


def main() -> None:
    """Entry point of ``ghostbatch``."""
    warnings.showwarning = _warn
    try:
        with log_shown():
            run(sys.argv[1:])
    except InputError as error:
        fail(str(error), 2, every_rank=isinstance(error, RankLocalError))
    except RankError as error:
        say(str(error))
        sys.stdout.flush()
        os._exit(1)  # an ordinary exit would wait for the lost rank once more
    except KeyboardInterrupt:
        fail(_stop_line(signal.SIGINT), 128 + signal.SIGINT)
    except Terminated as stop:
        fail(_stop_line(stop.number), 128 + stop.number)
    except BrokenPipeError:  # the reader of our output has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None
    except OSError as error:
        place, said = error.filename or "file", one_line(error.strerror or error)
        remedy = "free some space, or choose" if error.errno in FULL_DISK else "choose"
        fail(f"{place}: {said}; {remedy} another folder", 1)


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
    with _handling(_exit_at_once):
        with said_if_slow("starting (importing torch)"):
            command: Command = import_module(f"{__name__}.{name}").command
        with _handling(_terminate):
            command(rest)


@contextmanager
def _handling(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Have ``handler`` handle the stop signals, except those that are ignored, as under nohup."""
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    handled = {n: usual for n, usual in before.items() if usual not in (None, signal.SIG_IGN)}
    for number in handled:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number, usual in handled.items():
            signal.signal(number, usual)


class Terminated(BaseException):
    """A stop signal was received; like KeyboardInterrupt, only `main` catches it."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def _terminate(number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt if number == signal.SIGINT else Terminated(number)


def _exit_at_once(number: int, _frame: FrameType | None) -> None:
    """End the process; some libraries turn an exception during their import into another one."""
    if is_first_rank():
        os.write(2, f"ghostbatch: {_stop_line(number)}\n".encode())
    os._exit(128 + number)


def _stop_line(number: int) -> str:
    words = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}
    how = words.get(number) or f"stopped by {signal.Signals(number).name}"  # type: ignore[call-overload]
    return f"{how}; run the same command again to continue"


def fail(line: str, code: int, every_rank: bool = False) -> None:
    """Print one line and exit; by default only on the first rank, as all fail alike."""
    if every_rank or is_first_rank():
        say(line)
    raise SystemExit(code)


def _warn(message: Warning | str, *_: Any, **__: Any) -> None:
    """Print a warning as one line."""
    if is_first_rank() or isinstance(message, RankLocalWarning):
        say(one_line(message))
