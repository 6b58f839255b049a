"""``ghostbatch study``: a table of the paper."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from ghostbatch.cli.flags import cores, name_first, parse
from ghostbatch.errors import InputError
from ghostbatch.report.page import write_report
from ghostbatch.report.terminal import Counting, StudyProgress, print_tables
from ghostbatch.study import find_study, measure, run_cells


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
    data_dir: Path | None = None
    """Where the data sets are; None is GHOSTBATCH_DATA, or the folder data here."""


def study_command(argv: Sequence[str]) -> None:
    """Run a study, then print its tables and the path of its page."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise InputError(
            "study", "torchrun would run it once per rank", "start it alone; it has --jobs"
        )
    name, rest = name_first(argv, "study", "study")
    study = find_study(name)
    options = parse(StudyOptions, rest, f"study {name}", StudyOptions(out=Path("runs") / name))
    if options.jobs < 1:
        raise InputError("jobs", f"{options.jobs} is below 1", "use 1 or more")
    seeds = _seeds(options.seeds) if options.seeds is not None else None
    columns = options.columns.split(",") if options.columns is not None else None
    for flag, value in (("columns", columns), ("seeds", seeds), ("device", options.device)):
        if value is not None and not study.rows:
            raise InputError(flag, f"{name} has no runs", "leave it out")
    cells = study.cells(columns, seeds, options.out)
    console = Console()
    if cells:
        with StudyProgress(cells, console) as progress:
            run_cells(
                cells,
                options.out,
                jobs=options.jobs,
                on_news=progress.news,
                device=options.device,
                checkpoint_seconds=options.checkpoint_seconds,
                data_dir=options.data_dir,
            )
    for instrument in study.instruments:
        with Counting(instrument, console) as counting:
            measure(instrument, options.out, counting)
    print_report(options.out, console)


def _seeds(text: str) -> list[int]:
    try:
        return list(dict.fromkeys(int(seed) for seed in text.split(",")))
    except ValueError:
        raise InputError("seeds", f"{text!r} is no list", "give whole numbers: 0,1,2") from None


def print_report(folder: Path, console: Console) -> None:
    """Make the page of a folder of runs; print its tables and where it is."""
    page, tables = write_report(folder)
    print_tables(tables, console)
    console.print(f"report: {page}", highlight=False, soft_wrap=True)
