"""Runs the cells of a study: skips those that have ended, and keeps an executor busy."""

import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from threading import Thread

import torch

from ghostbatch.data import find_info
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
        cells: those of its cells to run.
        out: the study's folder.
        jobs: how many cells run side by side, at most.
        on_event: called in this thread with every record and summary.
        where: where the cells run; several GPUs are used if no single one is named.
        make_executor: given the descriptor of the study's lock, returns what runs the jobs.

    """
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

    Cells that follow another run's distances start when all others have ended.
    """
    waiting = []
    for cell in cells:
        if (summary := read_summary(cell.folder(out) / "summary.json")) is not None:
            on_event(cell, summary)
        else:
            waiting.append(cell)
    for follows in (False, True):
        ready = deque(cell for cell in waiting if cell.follows == follows and _can_start(cell))
        _run_side_by_side(ready, out, executor, placement, where, on_event)


def _can_start(cell: Cell) -> bool:
    """Return False, with a warning, if the run that this cell follows diverged."""
    if cell.recipe.reference is None:
        return True
    summary = read_summary(Path(cell.recipe.reference) / "summary.json")
    if summary is not None and summary.status == "diverged":
        warnings.warn(f"{cell.name} is left out: the run that it follows diverged", stacklevel=3)
        return False
    return True


def _run_side_by_side(
    waiting: deque[Cell],
    out: Path,
    executor: Executor,
    placement: Placement,
    where: Where,
    on_event: OnEvent,
) -> None:
    """Start each cell when a device has room for it; report events until all have ended."""
    shapes = {data: find_info(data).shape for data in {cell.recipe.data for cell in waiting}}
    mail: SimpleQueue[tuple[Cell, Message]] = SimpleQueue()
    running: dict[Cell, tuple[str, float]] = {}
    while waiting or running:
        while waiting:
            cell = waiting[0]
            share = gpu_share(where.micro or cell.recipe.batch, shapes[cell.recipe.data])
            if (device := placement.take(share)) is None:
                break
            running[waiting.popleft()] = device, share
            job = Job(cell.name, cell.recipe, cell.folder(out), replace(where, device=device))
            events = executor.submit(job)
            Thread(target=_forward, args=(cell, events, mail), daemon=True).start()
        cell, message = mail.get()
        if message is None:
            placement.release(*running.pop(cell))
        elif isinstance(message, Exception):
            raise message
        else:
            on_event(cell, message)


def _forward(cell: Cell, events: Iterator[Event], mail: SimpleQueue[tuple[Cell, Message]]) -> None:
    """Put the events of a job into ``mail``; at the end None, or the exception that it raised."""
    try:
        for event in events:
            mail.put((cell, event))
        mail.put((cell, None))
    except Exception as error:  # for the thread that reads the mail to raise
        mail.put((cell, error))
