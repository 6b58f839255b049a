"""Runs the cells of a study: skips those that have ended, and keeps an executor busy."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from threading import Thread

import torch

from ghostbatch.data import find_info
from ghostbatch.errors import check_positive, check_seconds
from ghostbatch.files import locked, remove_leftovers
from ghostbatch.study.executor import Event, Executor, Job, Where
from ghostbatch.study.local import LocalExecutor
from ghostbatch.study.manifest import NAME, held_part, read_study, write_study
from ghostbatch.study.placement import Placement, find_devices, gpu_share
from ghostbatch.study.studies import Cell, Study
from ghostbatch.train import find_device, intact_summary, read_summary
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
    check_positive(jobs=jobs, threads=where.threads, micro=where.micro)
    check_seconds(checkpoint_seconds=where.checkpoint_seconds)
    if where.device is not None:
        find_device(where.device)  # refuses one that is not there
    held_part(study, cells, read_study(out))  # refuses the folder of another study
    for cell in cells:  # refuse a folder of another recipe, or with files that cannot be read
        folder = RunFolder(cell.folder(out), cell.plan)
        with warnings.catch_warnings(action="ignore"):  # the worker will warn
            if folder.summary() is None:
                folder.checkpoint()
    placement = Placement(find_devices(where.device, torch.cuda.device_count()), jobs)
    with locked(out) as lock, closing(make_executor(lock)) as executor:
        remove_leftovers(out, owned=(NAME,))
        write_study(held_part(study, cells, read_study(out)), out)
        run_cells(cells, out, executor, placement, where, on_event)


def run_cells(
    cells: Sequence[Cell],
    out: Path,
    executor: Executor,
    placement: Placement,
    where: Where,
    on_event: OnEvent,
) -> None:
    """Run each cell, the first ones first, as soon as a device has room for it.

    Cells that have ended are only reported. A cell that follows the distances of another run starts
    when that run has ended; if it diverged, the cell is left out.
    """
    waiting: list[Cell] = []
    for cell in cells:
        if (summary := intact_summary(cell.folder(out) / "summary.json")) is not None:
            on_event(cell, summary)
        else:
            waiting.append(cell)
    images = {(cell.recipe.data, cell.recipe.image_size) for cell in waiting}
    shapes = {image: find_info(*image).shape for image in images}
    mail: SimpleQueue[tuple[Cell, Message]] = SimpleQueue()
    running: dict[Cell, tuple[str, float]] = {}
    while waiting or running:
        unfinished = {str(cell.folder(out.resolve())) for cell in running}
        for cell in tuple(waiting):
            recipe, folder = cell.recipe, cell.folder(out)
            if _reference_diverged(cell):
                waiting.remove(cell)
                line = f"{cell.name} is left out: the run that it follows diverged"
                warnings.warn(line, stacklevel=2)
                continue
            micro = where.micro if recipe.ghost and recipe.batch > (where.micro or 0) else None
            share = gpu_share(micro or recipe.batch, shapes[recipe.data, recipe.image_size])
            device = None if recipe.reference in unfinished else placement.take(share)
            if device is not None:
                waiting.remove(cell)
                running[cell] = device, share
                job = Job(cell.name, recipe, folder, replace(where, device=device, micro=micro))
                events = executor.submit(job)
                Thread(target=_forward, args=(cell, events, mail), daemon=True).start()
            unfinished.add(str(cell.folder(out.resolve())))
        while running:
            cell, message = mail.get()
            if isinstance(message, Exception):
                raise message
            if message is None:
                placement.release(*running.pop(cell))
                break
            on_event(cell, message)


def _reference_diverged(cell: Cell) -> bool:
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
