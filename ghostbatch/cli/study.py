"""``ghostbatch study``: a table or a figure of the paper."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console

from ghostbatch.cli import fail
from ghostbatch.cli.about import about_all, about_one
from ghostbatch.cli.default_out import folder_of_changes
from ghostbatch.cli.flags import cores, parse_words, print_help, take_name
from ghostbatch.cli.notices import say
from ghostbatch.cli.plan import find_ghost
from ghostbatch.cli.report import print_report
from ghostbatch.cli.words import Words, sort_words
from ghostbatch.errors import InputError, check_positive
from ghostbatch.recipe import Precision
from ghostbatch.recipes import RECIPES, find_recipe
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
from ghostbatch.study.executor import Executor
from ghostbatch.study.local import LocalExecutor
from ghostbatch.study.ray import RayExecutor
from ghostbatch.study.runner import check_study, read_ended
from ghostbatch.study.select import (
    check_networks,
    held_out,
    in_precision,
    on_data,
    scaled,
    with_warmup,
)
from ghostbatch.study.studies import columns


@dataclass(frozen=True, kw_only=True)
class StudyOptions:
    """Run a table or a figure of the paper: recipes by columns by seeds."""

    out: Path | None = None
    """Folder in which the study runs or continues; None is one in runs, named by what it runs."""
    rows: str | None = None
    """Only these rows, for example f1-mnist,c1-cifar10; None is all.
    An instrument is measured only if the rows, columns and seeds leave in a run of its recipe."""
    columns: str | None = None
    """Only these columns, for example SB,LB,+LR; None is all."""
    seeds: str | None = None
    """These seeds in place of the study's own, for example 0,1,2."""
    scale: float = 1.0
    """Multiply all epochs of all columns: 0.1 is a tenth of the work. Reports print it."""
    data: str | None = None
    """Use this data set in every row; None is each row's own."""
    holdout: int = 0
    """Training images to keep aside and to evaluate on, in place of the test set."""
    precision: Precision | None = None
    """Compute every column in fp32, bf16 or fp64; None is each recipe's own, which is fp32."""
    warmup: float = 0
    """Epochs over which every column's rate rises from 0; `scale` multiplies them, too."""
    jobs: int | None = None
    """Most runs at a time; 0 runs them in this process; None is one per core, with Ray no limit."""
    ray: str | None = None
    """Run on a Ray cluster: its address; auto is the one of this machine, local starts one here."""
    dry_run: bool = False
    """Print what is left to do, and an estimate of the time; run nothing."""
    where: Annotated[Where, tyro.conf.arg(name="")] = field(default_factory=Where)


@dataclass(frozen=True, kw_only=True)
class ColumnsOptions(StudyOptions):
    """Run the paper's five columns for a recipe: SB, LB, +LR, +GBN, +RA."""

    batch: int = 4096
    """The large batch."""
    ghost: int | Literal["auto"] = "auto"
    """Samples per ghost; auto is base_batch, at most 128."""


CHANGES: dict[str, tuple[Any, Callable[[Study, Any], Study]]] = {
    "warmup": (0, with_warmup),
    "scale": (1, scaled),
    "data": (None, on_data),
    "holdout": (0, held_out),
    "precision": (None, in_precision),
}
"""Flags that change every recipe of a study: the value that changes nothing, and the change."""


def command(argv: Sequence[str]) -> None:
    """Run a study; print its tables, the path of its page, and what failed."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise InputError(
            "study", "torchrun would run it once per rank", "start it alone; it has --ranks"
        )
    study, out, options = _read(argv)
    where, console = options.where, plain_console()
    cells = _cells(study, out, options)
    jobs = options.jobs
    if jobs == 0 and options.ray is not None:
        raise InputError("ray", "jobs 0 runs in this process", "leave out one of them")
    check_positive(ranks=where.ranks)
    if jobs is None:  # Ray queues what it has no room for
        jobs = max(1, cores() // where.ranks if options.ray is None else len(cells))
    if options.dry_run:
        check_study(study, cells, out, jobs, where)
        console.print(describe_cost(_cost(cells, out, options, jobs)))
        return
    with progress_bars(console) as bars:
        progress = StudyProgress(cells, bars)

        def start(lock: int) -> Executor:
            local = LocalExecutor(lock)
            if options.ray is None:
                local.prepare(out, where)  # may refuse, before a line says that workers start
            cost = _cost(cells, out, options, jobs)
            workers = min(max(1, jobs), len(cost.cells))
            if options.ray is None:
                progress.start(cost, workers)
                return local
            cluster = RayExecutor(options.ray)
            progress.start(cost, min(workers, cluster.cpus))
            return cluster

        failures = run_study(
            *(study, cells, out),
            jobs=jobs,
            on_event=progress.on_event,
            where=where,
            make_executor=start,
        )
        for instrument in study.instruments_of(cells):
            try:
                measure(instrument, out, where, instrument_progress(instrument.name, bars))
            except InputError as error:
                failures.append(Failure(instrument.name, str(error)))
    if failures:
        _print_and_list(out, console, failures)
    print_report(out, console)


def _cost(cells: Sequence[Cell], out: Path, options: StudyOptions, jobs: int) -> Cost:
    """Return what the cells cost that have not ended; a cluster's pace cannot be timed here."""
    left = [cell for cell in cells if read_ended(cell.folder(out)) is None]
    if options.ray is not None:
        return Cost(left)
    return measure_cost(left, options.where, min(max(1, jobs), cores()))


def _read(argv: Sequence[str]) -> tuple[Study, Path, StudyOptions]:
    """Return the study that a command names with what it selects, its folder and all options."""
    if "columns" in argv:  # maybe as the value of a flag
        words = sort_words(ColumnsOptions, argv, "study")
        if words.names[:1] == ["columns"]:
            return _read_columns(words)
    words = sort_words(StudyOptions, argv, "study")
    name = take_name(words, "study", STUDIES)
    if name is None:
        example = "For example: ghostbatch study quick --seeds 0"
        more = "For any recipe: ghostbatch study columns RECIPE --batch N runs the five columns."
        about = about_all(StudyOptions, "STUDY", STUDIES, example, more)
        print_help(StudyOptions, "study STUDY", about)
    study = find_study(name)
    held = [f"Rows: {', '.join(study.rows)}."] if len(study.rows) > 1 else []
    held += [f"Columns: {', '.join(study.columns)}."] if study.rows else []
    about = about_one(StudyOptions, name, STUDIES, *held)
    options = parse_words(StudyOptions, words, f"study {name}", about=about)
    return _select(study, name, {}, options)


def _read_columns(words: Words) -> tuple[Study, Path, StudyOptions]:
    """Return what `_read` does, for the five columns of a recipe."""
    del words.names[0]
    name = take_name(words, "recipe", RECIPES)
    if name is None:
        example = "For example: ghostbatch study columns f1-digits --batch 1024 --ghost 32"
        about = about_all(ColumnsOptions, "RECIPE", RECIPES, example)
        print_help(ColumnsOptions, "study columns RECIPE", about)
    recipe = find_recipe(name)
    what, *_ = (RECIPES[name].__doc__ or "").splitlines()
    about = about_one(ColumnsOptions, "columns", {"columns": columns}, f"{name}: {what}")
    options = parse_words(ColumnsOptions, words, f"study columns {name}", about=about)
    ghost = find_ghost(options.ghost, recipe, options.batch)
    sizes = {"batch": options.batch, "ghost": ghost}
    return _select(columns(name, **sizes), f"columns-{name}", sizes, options)


def _select(
    study: Study, name: str, changes: dict[str, Any], options: StudyOptions
) -> tuple[Study, Path, StudyOptions]:
    """Return the study as the options change its recipes, and its folder.

    If none is given, the folder is called by the study's name and all changes.
    """
    changes = dict(changes)
    for flag, (neutral, change) in CHANGES.items():
        if (value := getattr(options, flag)) != neutral:
            study, changes[flag] = change(study, value), value
    return study, options.out or folder_of_changes(name, changes), options


def _cells(study: Study, out: Path, options: StudyOptions) -> list[Cell]:
    """Return the cells of the rows, columns and seeds that the options select."""
    texts = (options.rows, options.columns)
    rows, only = (None if text is None else text.split(",") for text in texts)
    seeds = None if options.seeds is None else _seeds(options.seeds)
    device = options.where.device
    selected: dict[str, object] = {"rows": rows, "columns": only, "seeds": seeds, "device": device}
    given = [flag for flag, value in selected.items() if value is not None]
    given += [flag for flag, (neutral, _) in CHANGES.items() if getattr(options, flag) != neutral]
    if given and not study.rows:
        raise InputError(given[0], f"{study.name} has no runs", "leave it out")
    cells = study.cells(only, seeds, out, rows)
    if options.data is not None:
        check_networks(cells)
    return cells


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
