"""Runs the cells of a study: skips those that have ended, and keeps an executor busy."""

import errno
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from queue import SimpleQueue
from threading import Thread

from ghostbatch.data import BatchSplit, find_info
from ghostbatch.errors import (
    InputError,
    check_positive,
    check_positive_or_none,
    check_seconds,
    one_line,
)
from ghostbatch.files import FULL_DISK, locked, remove_leftovers
from ghostbatch.study.declare import Cell, Study
from ghostbatch.study.executor import Event, Executor, Failure, Job, Where, WorkerDied, forward
from ghostbatch.study.local import LocalExecutor
from ghostbatch.study.manifest import NAME, held_part, read_study, write_study
from ghostbatch.study.placement import Placement, gpu_share
from ghostbatch.train import Record, Summary, intact_summary, read_header
from ghostbatch.train.device import check_threads

ATTEMPTS = 3
"""How many workers may die at a cell before it counts as failed."""

SHARED_ERRORS = {*FULL_DISK, errno.EROFS}
"""Errors of the disk, which all cells share: they end the study, as every cell would fail."""

OnEvent = Callable[[Cell, Event | Failure], None]
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
) -> list[Failure]:
    """Run cells of a study in its folder, at most ``jobs`` at a time; return those that failed.

    With ``jobs`` 0 they run in this process and this thread, one after another, as in a call of
    `train`: for notebooks and debuggers. A fault of a cell is then raised here.

    Nothing is written if a cell's folder holds a run of another recipe. A cell whose worker dies is
    continued by a new worker, at most `ATTEMPTS` times. A cell that cannot be run, because its
    files are damaged or memory is short, is reported as failed, and the others go on. If all cells
    fail for the same reason, that is raised. A full disk ends the study. After any exception,
    KeyboardInterrupt included, the same call continues.

    Args:
        study: what ``study.json`` describes.
        cells: those of its cells to run.
        out: the study's folder.
        jobs: how many cells run side by side, at most; 0 uses no executor.
        on_event: called in this thread with every record, summary and failure.
        where: where the cells run; several GPUs are used if no single one is named.
        make_executor: given the descriptor of the study's lock, returns what runs the jobs.

    """
    check_study(study, cells, out, jobs, where)
    make = make_executor if jobs else LocalExecutor
    with locked(out) as lock, closing(make(lock)) as executor:
        placement = Placement(executor.prepare(out, where), max(1, jobs))
        remove_leftovers(out, owned=(NAME,))
        write_study(held_part(study, cells, read_study(out)), out)
        runner = CellRunner(out, executor if jobs else None, placement, where, on_event)
        return runner.run(cells)


def check_study(study: Study, cells: Sequence[Cell], out: Path, jobs: int, where: Where) -> None:
    """Refuse what `run_study` cannot run; write nothing."""
    if study.provisional:
        problem = f"the settings of {study.name} are provisional"
        raise InputError("study", problem, study.provisional)
    if jobs < 0:
        raise InputError("jobs", f"{jobs} is below 0", "use 0 or more")
    check_positive(ranks=where.ranks)
    check_positive_or_none(threads=where.threads, micro=where.micro)
    check_threads(where.threads)
    check_seconds(checkpoint_seconds=where.checkpoint_seconds)
    if not jobs and where.ranks > 1:
        raise InputError("ranks", "one process is one rank", "use jobs 1 or more")
    if (out / "run.json").exists():
        raise InputError("out", f"{out} holds a single run", "choose another folder")
    held_part(study, cells, read_study(out))  # refuses the folder of another study
    for cell in cells:
        _check_recipe(cell, out)
        _check_split(cell, out, where)


def _check_split(cell: Cell, out: Path, where: Where) -> None:
    """Refuse micro-batches and ranks that would split ghosts, unless the cell has ended."""
    recipe = cell.recipe
    split = BatchSplit(
        batch=recipe.batch,
        micro=where.micro_of(recipe) or recipe.batch,
        world=where.ranks,
        multiple_of=recipe.ghost or 1,
    )
    try:
        split.check()
    except InputError as error:
        if read_ended(cell.folder(out)) is not None:
            return
        remedy = f"{error.remedy}, or leave the cell out by --rows or --columns"
        raise InputError(error.field, f"{cell.name}: {error.problem}", remedy) from None


def _check_recipe(cell: Cell, out: Path) -> None:
    """Refuse a folder that holds a run of another recipe."""
    folder = cell.folder(out)
    if not (folder / "run.json").exists():
        return
    try:
        header = read_header(folder)
    except InputError:  # a damaged file concerns this cell only, which will report it
        return
    if fields := cell.recipe.differences(header["recipe"]):
        problem = f"{folder} belongs to another recipe (other {', '.join(fields)})"
        raise InputError("out", problem, "choose another folder or delete it")


class CellRunner:
    """Runs cells, the first ones first, as soon as a device has room.

    Without an executor they run in this thread. Cells that have ended are only reported. A cell
    that follows the distances of another run starts when that run has ended; if it diverged or
    failed, the cell is left out.
    """

    def __init__(
        self,
        out: Path,
        executor: Executor | None,
        placement: Placement,
        where: Where,
        on_event: OnEvent,
    ) -> None:
        self._out, self._resolved = out, out.resolve()
        self._executor, self._placement, self._where = executor, placement, where
        self._on_event = on_event
        self._info = cache(find_info)  # a folder is listed, which takes long
        self._mail: SimpleQueue[tuple[Cell, Message]] = SimpleQueue()
        self._waiting: list[Cell] = []
        self._running: dict[Cell, tuple[str, float]] = {}
        """The device of each running cell, and its share of it."""
        self._deaths: Counter[Cell] = Counter()
        self._failures: list[Failure] = []
        self._refused: list[InputError] = []
        """Why cells failed that were refused."""
        self._unfinished: set[str] = set()
        """Folders of cells that have not ended or failed; no cell starts before its reference."""
        self._unusable: dict[str, str] = {}
        """Folders of runs that no other can follow, and why."""

    def run(self, cells: Sequence[Cell]) -> list[Failure]:
        """Run the cells; return those that failed."""
        for cell in cells:
            if (summary := read_ended(cell.folder(self._out))) is not None:
                self._note_end(cell, summary)
            else:
                self._waiting.append(cell)
        self._unfinished = {self._key(cell) for cell in self._waiting}
        while self._waiting or self._running:
            self._start_waiting()
            self._wait_for_a_job()
        if cells and len(self._refused) == len(cells) and len(set(map(str, self._refused))) == 1:
            raise self._refused[0]
        return self._failures

    def _start_waiting(self) -> None:
        """Start the waiting cells for which a device has room, in their order."""
        waiting, self._waiting = self._waiting, []
        for cell in waiting:
            reference = cell.recipe.reference
            if reference in self._unusable:
                why = self._unusable[reference]
                warnings.warn(
                    f"{cell.name} is left out: the run that it follows {why}", stacklevel=2
                )
            elif reference in self._unfinished or (job := self._place(cell)) is None:
                self._waiting.append(cell)
            else:
                self._start(cell, job)

    def _place(self, cell: Cell) -> Job | None:
        """Return the job of a cell on a device, or None if no device has room."""
        recipe, micro = cell.recipe, self._where.micro_of(cell.recipe)
        shape = self._info(recipe.data, recipe.image_size).shape
        share = 1.0 if self._where.ranks > 1 else gpu_share(micro or recipe.batch, shape)
        device = self._placement.take(share)
        if device is None:
            return None
        self._running[cell] = device, share
        where = replace(self._where, device=device, micro=micro)
        folder, alone = cell.folder(self._out), self._deaths[cell] > 0
        return Job(cell.name, recipe, folder, where, share, alone, cell.evaluations)

    def _start(self, cell: Cell, job: Job) -> None:
        """Submit a job; without an executor, run it in this thread to its end."""
        if self._executor is not None:
            events = self._executor.submit(job)
            put = partial(forward, events, lambda message: self._mail.put((cell, message)))
            Thread(target=put, daemon=True).start()
            return
        try:
            self._mail.put((cell, job.run(lambda record: self._on_event(cell, record))))
            self._mail.put((cell, None))
        except (InputError, OSError) as error:
            self._mail.put((cell, error))

    def _wait_for_a_job(self) -> None:
        """Handle messages until a job has ended; return at once if none is running."""
        while self._running:
            cell, message = self._mail.get()
            if isinstance(message, Summary):
                self._note_end(cell, message)
            elif isinstance(message, Record):
                self._on_event(cell, message)
            else:
                self._placement.release(*self._running.pop(cell))
                if message is not None:
                    self._handle(cell, message)
                return

    def _handle(self, cell: Cell, error: Exception) -> None:
        """Retry a cell whose worker died, or note its failure; raise what ends the study."""
        reason = str(error)
        if isinstance(error, WorkerDied):
            self._deaths[cell] += 1
            if (deaths := self._deaths[cell]) < ATTEMPTS:
                self._waiting.append(cell)
                attempt = f"attempt {deaths + 1} of {ATTEMPTS}"
                warnings.warn(f"{error}; a new one will continue its run ({attempt})", stacklevel=2)
                return
            reason = f"its worker died {deaths} times, the last time by {error.how}"
        elif isinstance(error, InputError):
            self._refused.append(error)
        elif isinstance(error, OSError) and error.errno not in SHARED_ERRORS:
            said = one_line(error.strerror or error)
            reason = f"{error.filename or 'file'}: {said}"
        else:
            raise error
        self._unfinished.discard(self._key(cell))
        self._unusable[self._key(cell)] = "failed"
        failure = Failure(cell.name, reason)
        self._failures.append(failure)
        self._on_event(cell, failure)

    def _note_end(self, cell: Cell, summary: Summary) -> None:
        self._unfinished.discard(self._key(cell))
        if summary.status == "diverged":
            self._unusable[self._key(cell)] = "diverged"
        self._on_event(cell, summary)

    def _key(self, cell: Cell) -> str:
        """Return the cell's folder as a reference names it."""
        return str(cell.folder(self._resolved))


def read_ended(folder: Path) -> Summary | None:
    """Return the summary of a run that has ended; None if it has not, or must rebuild a file."""
    try:
        read_header(folder)
    except (InputError, OSError):
        return None
    return intact_summary(folder / "summary.json")
