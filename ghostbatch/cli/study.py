"""``ghostbatch study``: a table of the paper."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from ghostbatch.cli import fail
from ghostbatch.cli.about import about_all, about_one
from ghostbatch.cli.flags import cores, parse, print_help, take_name
from ghostbatch.cli.notices import say
from ghostbatch.cli.report import print_report
from ghostbatch.cli.words import sort_words
from ghostbatch.errors import InputError
from ghostbatch.report.terminal import (
    StudyProgress,
    describe_cost,
    instrument_progress,
    plain_console,
    progress_bars,
)
from ghostbatch.study import (
    STUDIES,
    Cell,
    Cost,
    Failure,
    Study,
    Where,
    find_study,
    measure,
    measure_cost,
    run_study,
)
from ghostbatch.study.local import LocalExecutor
from ghostbatch.study.runner import read_ended


@dataclass(frozen=True, kw_only=True)
class StudyOptions:
    """Run a table of the paper: recipes by columns by seeds."""

    out: Path
    """The study's folder; an interrupted study continues from what it holds."""
    columns: str | None = None
    """Only these columns, for example SB,LB,+LR; None is all."""
    seeds: str | None = None
    """These seeds in place of the study's own, for example 0,1,2."""
    jobs: int = field(default_factory=cores)
    """Largest number of runs at a time."""
    dry_run: bool = False
    """Print what is left to do, and an estimate of the time; run nothing."""
    where: Annotated[Where, tyro.conf.arg(name="")] = field(default_factory=Where)


def command(argv: Sequence[str]) -> None:
    """Run a study; print its tables, the path of its page, and what failed."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise InputError(
            "study", "torchrun would run it once per rank", "start it alone; it has --jobs"
        )
    study, options = _read(argv)
    seeds = _seeds(options.seeds) if options.seeds is not None else None
    columns = options.columns.split(",") if options.columns is not None else None
    for flag, value in (("columns", columns), ("seeds", seeds), ("device", options.where.device)):
        if value is not None and not study.rows:
            raise InputError(flag, f"{study.name} has no runs", "leave it out")
    out, where, console = options.out, options.where, plain_console()
    cells = study.cells(columns, seeds, out)
    if options.dry_run:
        console.print(describe_cost(_cost(cells, options)))
        return
    with progress_bars(console) as bars:
        progress = StudyProgress(cells, bars)

        def start(lock: int) -> LocalExecutor:
            cost = _cost(cells, options)
            progress.start(cost, min(options.jobs, len(cost.cells)))
            return LocalExecutor(lock)

        failures = run_study(
            *(study, cells, out),
            jobs=options.jobs,
            on_event=progress.on_event,
            where=where,
            make_executor=start,
        )
        for instrument in study.instruments:
            try:
                measure(instrument, out, where, instrument_progress(instrument.name, bars))
            except InputError as error:
                failures.append(Failure(instrument.name, str(error)))
    if failures:
        _print_and_list(out, console, failures)
    print_report(out, console)


def _cost(cells: Sequence[Cell], options: StudyOptions) -> Cost:
    """Return what the cells cost here that have not ended in the study's folder."""
    left = [cell for cell in cells if read_ended(cell.folder(options.out)) is None]
    return measure_cost(left, options.where, min(options.jobs, cores()))


def _read(argv: Sequence[str]) -> tuple[Study, StudyOptions]:
    """Return the study that a command names, and its options."""
    words = sort_words(StudyOptions, argv, "study")
    name = take_name(words, "study", STUDIES)
    default = StudyOptions(out=Path("runs") / (name or "STUDY"))
    does = StudyOptions.__doc__
    if name is None:
        example = "For example: ghostbatch study quick --seeds 0"
        about = about_all(does, "STUDY", STUDIES, example)
        print_help(StudyOptions, "study STUDY", about, default)
    study = find_study(name)
    held = f"Columns: {', '.join(study.columns)}." if study.rows else ""
    about = about_one(does, name, STUDIES, held)
    return study, parse(StudyOptions, words.flags, f"study {name}", default, about)


def _print_and_list(out: Path, console: Console, failures: Sequence[Failure]) -> None:
    """Print the report, if there is anything to report, and what failed; exit with code 1."""
    lines = [f"{failure.name} failed: {failure.reason}" for failure in failures]
    try:
        print_report(out, console)
    except InputError as error:
        lines.insert(0, str(error))
    for line in lines:
        say(line)
    count = f"{len(failures)} parts of the study" if len(failures) > 1 else "one part of the study"
    fail(f"{count} failed; run the same command again to try again", 1)


def _seeds(text: str) -> list[int]:
    remedy = "give whole numbers: 0,1,2"
    try:
        seeds = list(dict.fromkeys(int(seed) for seed in text.split(",")))
    except ValueError:
        raise InputError("seeds", f"{text!r} is not a list", remedy) from None
    if min(seeds) < 0:
        raise InputError("seeds", f"{min(seeds)} is below 0", remedy)
    return seeds
