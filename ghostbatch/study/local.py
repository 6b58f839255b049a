"""Runs jobs in worker processes of this machine."""

import logging
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import IO, cast

from ghostbatch.study.executor import Event, Job, LogLine, WorkerDied
from ghostbatch.train import Record

LOGGER = logging.getLogger(__name__)
PATIENCE = 20.0
"""Seconds that workers get for their last checkpoint."""

START = """
from ghostbatch.processes import end_with_parent
end_with_parent()  # before torch is imported, which takes seconds
from ghostbatch.study.worker import main
main()
"""
"""The program of a worker."""

Worker = subprocess.Popen[bytes]
"""A process that runs `START`."""


class LocalExecutor:
    """Starts a worker process for each job that runs side by side; reuses those on the CPU.

    Args:
        lock: descriptor of the study's lock. Workers inherit it, so the study's folder stays
            locked until the last worker is gone.

    """

    def __init__(self, lock: int) -> None:
        self._lock = lock
        self._workers: list[Worker] = []
        self._idle: list[Worker] = []

    def submit(self, job: Job) -> Iterator[Event]:
        """Hand the job to an idle worker, or to a new one; return its events.

        Linux kills a worker when the thread that started it ends: call this in one that outlives
        the job.
        """
        self._idle = [worker for worker in self._idle if worker.poll() is None]
        reuse = self._idle and job.where.device == "cpu"
        worker = self._idle.pop() if reuse else self._start_worker(job.where.threads)
        stdin = cast(IO[bytes], worker.stdin)
        with suppress(BrokenPipeError):  # the worker is dead, which `_events` reports
            pickle.dump(job, stdin)
            stdin.flush()
        return self._events(job, worker)

    def _start_worker(self, threads: int | None) -> Worker:
        worker = subprocess.Popen(
            [sys.executable, "-c", START],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[self._lock],
            env={**os.environ, **({"OMP_NUM_THREADS": str(threads)} if threads else {})},
        )
        self._workers.append(worker)
        return worker

    def _events(self, job: Job, worker: Worker) -> Iterator[Event]:
        stdout = cast(IO[bytes], worker.stdout)
        try:
            while isinstance(reply := pickle.load(stdout), Record | LogLine):  # noqa: S301 (ours)
                if isinstance(reply, LogLine):
                    LOGGER.log(reply.level, "%s", reply.text)
                else:
                    yield reply
        except (EOFError, pickle.UnpicklingError):
            raise WorkerDied(job, _exit_code(worker)) from None
        if job.where.device == "cpu":
            self._idle.append(worker)
        else:  # end it: an idle worker would keep memory of the GPU
            worker.communicate()
        if isinstance(reply, Exception):
            raise reply
        yield reply

    def close(self) -> None:
        """Have every worker save a checkpoint and end; an interrupt meanwhile kills them."""
        try:
            for worker in self._workers:
                worker.terminate()
            deadline = time.monotonic() + PATIENCE
            for worker in self._workers:
                with suppress(subprocess.TimeoutExpired):
                    worker.wait(max(0.0, deadline - time.monotonic()))
        finally:
            for worker in self._workers:
                with suppress(BrokenPipeError), worker:  # leaving it closes its pipes and waits
                    worker.kill()


def _exit_code(worker: Worker) -> int:
    """Return the exit code of a worker that has closed its stdout; kill it if it does not end."""
    try:
        return worker.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        worker.kill()
        return worker.wait()
