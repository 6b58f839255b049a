"""The command line: parses and prints; decides nothing."""

import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console
from rich.table import Table as Grid

from ghostbatch import __version__
from ghostbatch.cli.flags import name_first, parse
from ghostbatch.data import DATASETS, find_info
from ghostbatch.errors import InputError
from ghostbatch.nn import MODELS
from ghostbatch.optim import Rule
from ghostbatch.recipe import Hold, Plan, Recipe
from ghostbatch.report.page import show_rates, write_report
from ghostbatch.report.terminal import StudyProgress, clock, print_tables
from ghostbatch.study import (
    PROVISIONAL,
    RECIPES,
    STUDIES,
    WorkerDied,
    find_recipe,
    find_study,
    run_cells,
)
from ghostbatch.train import Record, train

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
    try:
        run(sys.argv[1:])
    except InputError as error:
        _fail(str(error), 2)
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


def cores() -> int:
    """The cores that this process may use."""
    usable = getattr(os, "sched_getaffinity", None)
    return len(usable(0)) if usable else os.cpu_count() or 1


def _fail(line: str, code: int) -> None:
    print(f"ghostbatch: {line}", file=sys.stderr)
    raise SystemExit(code)


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


# ---------------------------------------------------------------------------------------- plan


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """A recipe adapted to another batch, next to the original."""

    batch: int
    """Samples per update of the adapted recipe, over all ranks."""
    lr_rule: Rule = "sqrt"
    """How the learning rate follows the batch."""
    ghost: int | Literal["auto"] | None = "auto"
    """Samples per ghost; auto is base_batch, at most 128; None is plain batch norm."""
    hold: Hold = "updates"
    """What stays as it was: the number of updates, or that of epochs."""
    json: bool = False
    """Print JSON instead of a table."""


def plan_command(argv: Sequence[str]) -> None:
    """Print the original and the adapted recipe side by side."""
    name, rest = name_first(argv, "recipe", "plan")
    recipe = find_recipe(name)
    options = parse(PlanOptions, rest, f"plan {name}")
    ghost = options.ghost
    if ghost == "auto":
        ghost = min(128, recipe.base_batch, options.batch)
    adapted = recipe.large(options.batch, options.lr_rule, ghost, options.hold)
    samples = find_info(recipe.data).samples
    plans = {"original": recipe.plan(samples), "adapted": adapted.plan(samples)}
    if options.json:
        print(json.dumps({which: _plan_data(plan) for which, plan in plans.items()}, indent=2))
        return
    grid = Grid("", *plans, title=name, title_justify="left", box=None, padding=(0, 2, 0, 0))
    shown = [_plan_lines(plan) for plan in plans.values()]
    for name in shown[0]:
        grid.add_row(name, *(lines[name] for lines in shown))
    Console().print(grid)


def _plan_data(plan: Plan) -> dict[str, Any]:
    seen = plan.seen
    return {
        "batch": plan.recipe.batch,
        "lr": plan.regime.lr,
        "drops": [[float(epoch), *rates] for epoch, *rates in seen.drops],
        "drop_updates": list(plan.drop_updates),
        "updates": plan.updates,
        "epochs": float(seen.epochs),
        "ghosts": plan.ghosts,
        "ghost": plan.recipe.ghost,
    }


def _plan_lines(plan: Plan) -> dict[str, str]:
    seen, ghost = plan.seen, plan.recipe.ghost
    return {
        "batch": f"{plan.recipe.batch:,}",
        "learning rate": f"{plan.regime.lr:.4g}",
        "drops (epoch)": ", ".join(f"{d[1]:.4g} ({float(d[0]):.4g})" for d in seen.drops) or "none",
        "rates (update)": show_rates(plan),
        "updates": f"{plan.updates:,}",
        "epochs": f"{float(seen.epochs):.4g}",
        "ghosts": f"{plan.ghosts} of {ghost}" if ghost else "plain batch norm",
    }


# --------------------------------------------------------------------------------------- train


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """One run; every field of the recipe is a flag."""

    recipe: Annotated[Recipe, tyro.conf.arg(name="")]
    out: Path
    """The run's folder; a run that was interrupted goes on from what it holds."""
    device: str | None = None
    """cpu, cuda, ...; None is the GPU if there is one."""
    threads: int | None = None
    """Threads for the CPU's arithmetic; None is PyTorch's choice."""
    evaluations: int = 20
    """How often the test set is looked at."""
    checkpoint_seconds: float = 30.0
    """Time between checkpoints."""


def train_command(argv: Sequence[str]) -> None:
    """Run one recipe and print how it goes."""
    name, rest = name_first(argv, "recipe", "train")
    default = TrainOptions(recipe=find_recipe(name), out=Path("runs") / name)
    options = parse(TrainOptions, rest, f"train {name}", default)
    console = Console()

    def show(record: Record) -> None:
        if record.split == "validation":
            console.print(
                f"update {record.update:>6,}  epoch {record.epoch:>6.4g}  lr {record.lr:.3g}  "
                f"loss {record.loss:.4f}  accuracy {record.accuracy:.2f} %  "
                f"distance {record.distance:.2f}",
                highlight=False,
                soft_wrap=True,
            )

    summary = train(
        options.recipe,
        out=options.out,
        device=options.device,
        threads=options.threads,
        evaluations=options.evaluations,
        checkpoint_seconds=options.checkpoint_seconds,
        on_record=show,
    )
    console.print(
        f"{summary.status}: accuracy {summary.accuracy:.2f} % after {summary.updates:,} updates "
        f"({summary.epochs:.4g} epochs) in {clock(summary.seconds)}; {options.out}",
        highlight=False,
        soft_wrap=True,
    )


# --------------------------------------------------------------------------------------- study


@dataclass(frozen=True, kw_only=True)
class StudyOptions:
    """A table of the paper: recipes by columns by seeds."""

    out: Path
    """The study's folder; a study that was interrupted goes on from what it holds."""
    columns: str | None = None
    """Only these columns, for example SB,LB,+LR."""
    seeds: str | None = None
    """Only these seeds, for example 0,1,2."""
    jobs: int = field(default_factory=cores)
    """Cells that run side by side, with one CPU thread each."""
    device: str | None = None
    """cpu, cuda, ...; None is the GPU if there is one."""
    checkpoint_seconds: float = 10.0
    """Time between checkpoints of a cell."""


def study_command(argv: Sequence[str]) -> None:
    """Run a study, then print its tables and the path of its page."""
    name, rest = name_first(argv, "study", "study")
    study = find_study(name)
    options = parse(StudyOptions, rest, f"study {name}", StudyOptions(out=Path("runs") / name))
    if options.jobs < 1:
        raise InputError("jobs", f"{options.jobs} is below 1", "use 1 or more")
    seeds = _seeds(options.seeds) if options.seeds is not None else None
    columns = options.columns.split(",") if options.columns is not None else None
    cells = study.cells(columns, seeds)
    console = Console()
    with StudyProgress(cells, console) as progress:
        run_cells(
            cells,
            options.out,
            jobs=options.jobs,
            on_news=progress.news,
            device=options.device,
            checkpoint_seconds=options.checkpoint_seconds,
        )
    _report(options.out, console)


def _seeds(text: str) -> list[int]:
    try:
        return list(dict.fromkeys(int(seed) for seed in text.split(",")))
    except ValueError:
        raise InputError("seeds", f"{text!r} is no list", "give whole numbers: 0,1,2") from None


# -------------------------------------------------------------------------------------- report


@dataclass(frozen=True)
class _ReportOptions:
    """Tables, figures and an HTML page from a folder of runs."""

    folder: tyro.conf.Positional[Path]
    """The --out of a study or of a train."""


def report_command(argv: Sequence[str]) -> None:
    """Make the page again from the run folders alone."""
    _report(parse(_ReportOptions, argv, "report").folder, Console())


def _report(folder: Path, console: Console) -> None:
    page, tables = write_report(folder)
    print_tables(tables, console)
    console.print(f"report: {page}", highlight=False, soft_wrap=True)


COMMANDS: dict[str, Callable[[Sequence[str]], None]] = {
    "list": list_command,
    "plan": plan_command,
    "train": train_command,
    "study": study_command,
    "report": report_command,
}
