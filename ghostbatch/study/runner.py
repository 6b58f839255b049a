"""Runs the cells of a study: skips those that have ended, and keeps an executor busy."""

import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from threading import Thread

import torch

from ghostbatch.data import find_info
from ghostbatch.errors import InputError
from ghostbatch.files import locked
from ghostbatch.study.executor import Event, Executor, Job, Where
from ghostbatch.study.local import LocalExecutor
from ghostbatch.study.manifest import Manifest
from ghostbatch.study.placement import Placement, find_devices, gpu_share
from ghostbatch.study.studies import Cell, Study
from ghostbatch.train import read_summary
from ghostbatch.train.folder import RunFolder

OnEvent = Callable[[Cell, Event], None]
Message = Event | Exception | None


def run_study(
    study: Study,
    cells: Sequence[Cell],
    out: Path,
    *,
    jobs: int,
    on_event: OnEvent,
    where: Where = Where(),  # noqa: B008 (frozen)
    make_executor: Callable[[int], Executor] = LocalExecutor,
) -> None:
    """Run cells of a study in its folder, at most ``jobs`` at a time.

    Nothing is written before every cell's folder is known to be new, or to belong to the cell and
    be readable. After any exception, KeyboardInterrupt included, the same call continues.

    Args:
        study: what ``study.json`` describes.
        cells: those of its cells to run; a run that another one follows comes before it.
        out: the study's folder.
        jobs: how many cells run side by side, at most.
        on_event: called in this thread with every record and summary.
        where: where the cells run; several GPUs are used if no single one is named.
        make_executor: given the descriptor of the study's lock, returns what runs the jobs.

    """
    if jobs < 1:
        raise InputError("jobs", f"{jobs} is below 1", "use 1 or more")
    manifest = Manifest.of(study, cells, Manifest.read(out))
    _check_folders(cells, out)
    placement = Placement(find_devices(where.device, torch.cuda.device_count()), jobs)
    with locked(out) as lock, closing(make_executor(lock)) as executor:
        manifest.write(out)
        run_cells(cells, out, executor, placement, where, on_event)


def _check_folders(cells: Sequence[Cell], out: Path) -> None:
    """Raise `InputError` for a folder of another recipe, or with files that cannot be read."""
    for cell in cells:
        folder = RunFolder(cell.folder(out), cell.plan)
        if folder.summary() is None:
            with warnings.catch_warnings(action="ignore"):  # the worker will warn
                folder.checkpoint()


def run_cells(
    cells: Sequence[Cell],
    out: Path,
    executor: Executor,
    placement: Placement,
    where: Where,
    on_event: OnEvent,
) -> None:
    """Run cells in order; those that have ended are only reported.

    A cell that follows the distances of another run starts when that run has ended; if it
    diverged, the cell is left out.
    """
    waiting = deque(_report_ended(cells, out, on_event))
    shapes = {data: find_info(data).shape for data in {cell.recipe.data for cell in waiting}}
    mail: SimpleQueue[tuple[Cell, Message]] = SimpleQueue()
    running: dict[Cell, tuple[str, float]] = {}
    while waiting or running:
        while waiting and not _follows_any(waiting[0], running, out):
            cell = waiting[0]
            share = gpu_share(where.micro or cell.recipe.batch, shapes[cell.recipe.data])
            if _reference_diverged(cell):
                waiting.popleft()
                line = f"{cell.name} is left out: the run that it follows diverged"
                warnings.warn(line, stacklevel=2)
            elif (device := placement.take(share)) is not None:
                running[waiting.popleft()] = device, share
                job = Job(cell.name, cell.recipe, cell.folder(out), replace(where, device=device))
                events = executor.submit(job)
                Thread(target=_forward, args=(cell, events, mail), daemon=True).start()
            else:
                break
        if running:
            cell, message = mail.get()
            if message is None:
                placement.release(*running.pop(cell))
            elif isinstance(message, Exception):
                raise message
            else:
                on_event(cell, message)


def _report_ended(cells: Sequence[Cell], out: Path, on_event: OnEvent) -> list[Cell]:
    """Report the summaries of cells that have ended; return the others."""
    others = []
    for cell in cells:
        if (summary := read_summary(cell.folder(out) / "summary.json")) is not None:
            on_event(cell, summary)
        else:
            others.append(cell)
    return others


def _follows_any(cell: Cell, running: Iterable[Cell], out: Path) -> bool:
    """Return whether a cell follows one of the running cells."""
    return cell.recipe.reference in {str(other.folder(out.resolve())) for other in running}


def _reference_diverged(cell: Cell) -> bool:
    """Return whether a cell follows a run that diverged."""
    if cell.recipe.reference is None:
        return False
    summary = read_summary(Path(cell.recipe.reference) / "summary.json")
    return summary is not None and summary.status == "diverged"


def _forward(cell: Cell, events: Iterator[Event], mail: SimpleQueue[tuple[Cell, Message]]) -> None:
    """Put the events of a job into ``mail``; at the end None, or the exception that it raised."""
    try:
        for event in events:
            mail.put((cell, event))
        mail.put((cell, None))
    except Exception as error:  # for the thread that reads the mail to raise
        mail.put((cell, error))
