"""Runs the cells of a study side by side, each in a worker process with a thread of its own."""

import asyncio
import json
import os
import sys
from asyncio import StreamReader, StreamWriter
from asyncio.subprocess import PIPE, Process
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

from ghostbatch.errors import InputError
from ghostbatch.study.studies import Cell
from ghostbatch.train import Record, Summary
from ghostbatch.train.files import locked
from ghostbatch.train.folder import RunFolder

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
) -> None:
    """Run all cells in order, ``jobs`` at a time; those that have ended are only reported.

    Nothing is written before every cell's folder is known to be free or its own. On any exception,
    KeyboardInterrupt included, the workers are stopped; running the same cells again goes on.
    """
    folders = {cell: RunFolder(cell.folder(out), cell.plan) for cell in cells}
    options: dict[str, Any] = {
        "device": device,
        "threads": 1,
        "checkpoint_seconds": checkpoint_seconds,
    }
    with locked(out) as lock:
        waiting: deque[Cell] = deque()
        for cell in cells:
            if (summary := folders[cell].summary()) is not None:
                on_news(cell, summary)
            else:
                waiting.append(cell)
        asyncio.run(_run(waiting, out, min(jobs, len(waiting)), lock, options, on_news))


async def _run(
    waiting: deque[Cell],
    out: Path,
    jobs: int,
    lock: int,
    options: dict[str, Any],
    on_news: OnNews,
) -> None:
    # The first exception ends asyncio.run, which cancels the other tasks, which stop their workers.
    await asyncio.gather(*(_work(waiting, out, lock, options, on_news) for _ in range(jobs)))


async def _work(
    waiting: deque[Cell], out: Path, lock: int, options: dict[str, Any], on_news: OnNews
) -> None:
    """One worker's life: take the next cell until none is left."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "ghostbatch.study.worker",
        stdin=PIPE,
        stdout=PIPE,
        pass_fds=[lock],  # the folder stays locked until the last worker is gone
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        while waiting:
            cell = waiting.popleft()
            job = {"recipe": cell.recipe.as_dict(), "out": str(cell.folder(out)), **options}
            await _follow(process, json.dumps(job), cell, on_news)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def _follow(process: Process, job: str, cell: Cell, on_news: OnNews) -> None:
    """Hand one job to a worker and pass on its news until the cell has ended."""
    stdin, stdout = cast(StreamWriter, process.stdin), cast(StreamReader, process.stdout)
    stdin.write(job.encode() + b"\n")
    async for line in stdout:
        news = json.loads(line)
        if "refused" in news:
            raise InputError(*news["refused"])
        if "summary" in news:
            on_news(cell, Summary(**news["summary"]))
            return
        on_news(cell, Record(**news["record"]))
    raise WorkerDied(
        f"the worker for {cell.row} {cell.column} seed {cell.recipe.seed} died; "
        "run the same command again to continue from its checkpoint"
    )
