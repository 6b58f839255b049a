"""``ghostbatch study``: a table of the paper."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from ghostbatch.cli import fail
from ghostbatch.cli.flags import cores, name_first, parse
from ghostbatch.cli.report import print_report
from ghostbatch.errors import InputError
from ghostbatch.report.terminal import InstrumentProgress, StudyProgress
from ghostbatch.study import Study, Where, WorkerDied, find_study, measure, run_study


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
    """How many runs work side by side at most, with one CPU thread each."""
    device: str | None = None
    """cpu, cuda, cuda:1, ...; None is all GPUs, or the CPU if there is none."""
    checkpoint_seconds: float = 10.0
    """Time between checkpoints of a run."""
    data_dir: Path | None = None
    """Folder of the data sets; None is GHOSTBATCH_DATA, or the folder data here."""

    @property
    def where(self) -> Where:
        """Where the runs and instruments of the study run."""
        return Where(
            device=self.device,
            data_dir=None if self.data_dir is None else str(self.data_dir),
            checkpoint_seconds=self.checkpoint_seconds,
        )


def command(argv: Sequence[str]) -> None:
    """Run a study; print its tables and the path of its page."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise InputError(
            "study", "torchrun would run it once per rank", "start it alone; it has --jobs"
        )
    name, rest = name_first(argv, "study", "study")
    study = find_study(name)
    options = parse(StudyOptions, rest, f"study {name}", StudyOptions(out=Path("runs") / name))
    console = Console()
    try:
        _run(study, options, console)
    except WorkerDied as error:
        fail(str(error), 1)
    for instrument in study.instruments:
        with InstrumentProgress(instrument.name, console) as progress:
            measure(instrument, options.out, options.where, progress)
    print_report(options.out, console)


def _run(study: Study, options: StudyOptions, console: Console) -> None:
    """Run the chosen cells of a study."""
    seeds = _seeds(options.seeds) if options.seeds is not None else None
    columns = options.columns.split(",") if options.columns is not None else None
    for flag, value in (("columns", columns), ("seeds", seeds), ("device", options.device)):
        if value is not None and not study.rows:
            raise InputError(flag, f"{study.name} has no runs", "leave it out")
    cells = study.cells(columns, seeds, options.out)
    with StudyProgress(cells, console) as progress:
        run_study(
            *(study, cells, options.out),
            jobs=options.jobs,
            on_event=progress.on_event,
            where=options.where,
        )


def _seeds(text: str) -> list[int]:
    try:
        return list(dict.fromkeys(int(seed) for seed in text.split(",")))
    except ValueError:
        raise InputError("seeds", f"{text!r} is no list", "give whole numbers: 0,1,2") from None
