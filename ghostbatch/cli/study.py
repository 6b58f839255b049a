"""``ghostbatch study``: a table of the paper."""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from ghostbatch.cli import fail
from ghostbatch.cli.flags import cores, name_first, parse
from ghostbatch.cli.report import print_report
from ghostbatch.errors import InputError
from ghostbatch.report.terminal import StudyProgress, instrument_progress, progress_bars
from ghostbatch.study import Failure, Where, find_study, measure, run_study


@dataclass(frozen=True, kw_only=True)
class StudyOptions:
    """Run a table of the paper: recipes by columns by seeds."""

    out: Path
    """The study's folder; an interrupted study continues from what it holds."""
    columns: str | None = None
    """Only these columns, for example SB,LB,+LR."""
    seeds: str | None = None
    """Only these seeds, for example 0,1,2."""
    jobs: int = field(default_factory=cores)
    """Largest number of runs at a time."""
    where: Annotated[Where, tyro.conf.arg(name="")] = field(default_factory=Where)


def command(argv: Sequence[str]) -> None:
    """Run a study; print its tables, the path of its page, and what failed."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise InputError(
            "study", "torchrun would run it once per rank", "start it alone; it has --jobs"
        )
    name, rest = name_first(argv, "study", "study")
    study = find_study(name)
    options = parse(StudyOptions, rest, f"study {name}", StudyOptions(out=Path("runs") / name))
    seeds = _seeds(options.seeds) if options.seeds is not None else None
    columns = options.columns.split(",") if options.columns is not None else None
    for flag, value in (("columns", columns), ("seeds", seeds), ("device", options.where.device)):
        if value is not None and not study.rows:
            raise InputError(flag, f"{study.name} has no runs", "leave it out")
    out, where, console = options.out, options.where, Console()
    cells = study.cells(columns, seeds, out)
    with progress_bars(console) as bars:
        on_event = StudyProgress(cells, bars).on_event
        failures = run_study(study, cells, out, jobs=options.jobs, on_event=on_event, where=where)
        for instrument in study.instruments:
            try:
                measure(instrument, out, where, instrument_progress(instrument.name, bars))
            except InputError as error:
                failures.append(Failure(instrument.name, str(error)))
    if failures:
        _print_and_list(out, console, failures)
    print_report(out, console)


def _print_and_list(out: Path, console: Console, failures: Sequence[Failure]) -> None:
    """Print the report, if there is anything to report, and what failed; exit with code 1."""
    lines = [f"{failure.name} failed: {failure.reason}" for failure in failures]
    try:
        print_report(out, console)
    except InputError as error:
        lines.insert(0, str(error))
    for line in lines:
        print(f"ghostbatch: {line}", file=sys.stderr)
    count = f"{len(failures)} parts of the study" if len(failures) > 1 else "one part of the study"
    fail(f"{count} failed; run the same command again to try again", 1)


def _seeds(text: str) -> list[int]:
    try:
        return list(dict.fromkeys(int(seed) for seed in text.split(",")))
    except ValueError:
        raise InputError("seeds", f"{text!r} is not a list", "give whole numbers: 0,1,2") from None
