"""Runs the cells of a study side by side, each in a worker process with a thread of its own."""

import json
import os
import subprocess
import sys
import time
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import IO, Any, cast

from ghostbatch.errors import InputError
from ghostbatch.files import locked
from ghostbatch.study.studies import Cell
from ghostbatch.train import Record, Summary, read_summary
from ghostbatch.train.folder import RunFolder

PATIENCE = 20.0
"""Seconds that workers get for their last checkpoint."""

OnNews = Callable[[Cell, Record | Summary], None]


class WorkerDied(RuntimeError):  # noqa: N818 (says what happened)
    """A worker ended without an answer: the machine ran out of memory, or someone killed it."""


def run_cells(
    cells: Sequence[Cell],
    out: Path,
    *,
    jobs: int,
    on_news: OnNews,
    device: str | None = None,
    checkpoint_seconds: float = 10.0,
    data_dir: Path | None = None,
) -> None:
    """Run all cells in order, ``jobs`` at a time; those that have ended are only reported.

    Nothing is written before every cell's folder is known to be free, or its own and sound. On any
    exception, KeyboardInterrupt included, the workers are stopped; running the same cells again
    goes on.
    """
    folders = {cell: RunFolder(cell.folder(out), cell.plan) for cell in cells}
    for folder in folders.values():
        if folder.summary() is None:
            with warnings.catch_warnings(action="ignore"):  # the worker will say it
                folder.checkpoint()
    options: dict[str, Any] = {"device": device, "threads": 1}
    options |= {"checkpoint_seconds": checkpoint_seconds}
    options |= {"data_dir": str(data_dir)} if data_dir is not None else {}
    with locked(out) as lock:
        waiting: deque[Cell] = deque()
        for cell in cells:
            if (summary := folders[cell].summary()) is not None:
                on_news(cell, summary)
            else:
                waiting.append(cell)
        for follows in (False, True):  # those whose reference must have ended come after it
            now = deque(cell for cell in waiting if cell.follows == follows and _can_start(cell))
            _work_through(now, out, jobs, lock, options, on_news)


def _can_start(cell: Cell) -> bool:
    """Whether the run that it follows, if any, came to a good end; the study goes on without it."""
    if cell.recipe.reference is None:
        return True
    summary = read_summary(Path(cell.recipe.reference) / "summary.json")
    if summary is not None and summary.status == "diverged":
        name = f"{cell.row} {cell.column} seed {cell.recipe.seed}"
        warnings.warn(f"{name} is left out: the run that it follows diverged", stacklevel=3)
        return False
    return True


def _work_through(
    waiting: deque[Cell],
    out: Path,
    jobs: int,
    lock: int,
    options: dict[str, Any],
    on_news: OnNews,
) -> None:
    """Keep ``jobs`` workers busy until no cell is waiting and none is running."""
    mail: SimpleQueue[tuple[Worker, dict[str, Any] | None]] = SimpleQueue()
    workers: list[Worker] = []
    running: dict[Worker, Cell] = {}

    def give(worker: Worker) -> None:
        running[worker] = cell = waiting.popleft()
        worker.send({"recipe": cell.recipe.as_dict(), "out": str(cell.folder(out)), **options})

    try:
        while waiting and len(workers) < jobs:
            workers.append(Worker(lock, mail))
            give(workers[-1])
        while running:
            worker, news = mail.get()
            if worker not in running:
                continue  # it was idle: nobody waits for it
            cell = running[worker]
            if news is None:
                raise WorkerDied(
                    f"the worker for {cell.row} {cell.column} seed {cell.recipe.seed} died; "
                    "run the same command again to continue from its checkpoint"
                )
            if "refused" in news:
                raise InputError(*news["refused"])
            if "failed" in news:
                raise OSError(*news["failed"])
            if "record" in news:
                on_news(cell, Record(**news["record"]))
            else:
                del running[worker]
                on_news(cell, Summary(**news["summary"]))
                if waiting:
                    give(worker)
    finally:
        _stop(workers)


def _stop(workers: Sequence["Worker"]) -> None:
    """Have every worker save what it is at and end; a second interruption ends them at once."""
    try:
        for worker in workers:
            worker.ask_to_end()
        deadline = time.monotonic() + PATIENCE
        for worker in workers:
            worker.wait(deadline - time.monotonic())
    finally:
        for worker in workers:
            worker.stop()


class Worker:
    """A process of `ghostbatch.study.worker`; its replies go to ``mail``, and None when it dies.

    It inherits ``lock``: the study's folder stays locked until the last worker is gone.
    """

    def __init__(
        self, lock: int, mail: "SimpleQueue[tuple[Worker, dict[str, Any] | None]]"
    ) -> None:
        self._mail = mail
        self._process = subprocess.Popen(
            [sys.executable, "-m", "ghostbatch.study.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=[lock],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self._stdin, self._stdout = (
            cast(IO[str], pipe) for pipe in (self._process.stdin, self._process.stdout)
        )
        self._listener = Thread(target=self._listen, daemon=True)
        self._listener.start()

    def send(self, job: dict[str, Any]) -> None:
        """Hand over a job; should the worker be dead, its None is in the mail."""
        with suppress(BrokenPipeError):
            self._stdin.write(json.dumps(job) + "\n")
            self._stdin.flush()

    def ask_to_end(self) -> None:
        """A cell that is running takes a checkpoint first."""
        self._process.terminate()

    def wait(self, seconds: float) -> None:
        """Give it so long to end."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(max(0.0, seconds))

    def stop(self) -> None:
        """End the process, at once: what it was at continues from its checkpoint."""
        self._process.kill()
        self._process.wait()
        self._listener.join()
        for pipe in (self._stdin, self._stdout):
            with suppress(BrokenPipeError):  # what was not sent needs no sending
                pipe.close()

    def _listen(self) -> None:
        for line in self._stdout:
            self._mail.put((self, json.loads(line)))
        self._mail.put((self, None))
