"""Runs jobs in worker processes of this machine."""

import logging
import os
import pickle
import subprocess
import sys
import time
from base64 import b64encode
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from threading import Lock, Thread
from typing import IO, cast

import torch

from ghostbatch.study.executor import Event, Job, LogLine, Where, WorkerDied, describe_exit
from ghostbatch.study.placement import SMALLEST_SHARE, find_devices
from ghostbatch.train import Record, find_device
from ghostbatch.train.state import can_share_process

LOGGER = logging.getLogger(__name__)
PATIENCE = 20.0
"""Seconds that workers get for their last checkpoint."""

START = """
from ghostbatch.processes import end_with_parent
from ghostbatch.stop import leave_signals_to_parent
end_with_parent()  # before torch is imported, which takes seconds
leave_signals_to_parent()
from {} import main
main()
"""
"""A program that ends with its parent."""

WORKER = START.format("ghostbatch.study.worker")
"""The program of a worker, and of each rank of a job with several."""

TORCHRUN = START.format("torch.distributed.run")


def log(line: LogLine) -> None:
    """Log what a worker has logged."""
    LOGGER.log(line.level, "%s", line.text)


class LocalExecutor:
    """Starts worker processes, and reuses those with one rank.

    Jobs that share a GPU share a worker, because kernels of two processes do not run at the same
    time on a GPU. There each runs in a thread with its own CUDA stream. Jobs whose numbers would
    then depend on each other are kept apart, see `can_share_process`.

    Args:
        lock: descriptor of the study's lock. Workers inherit it, so the study's folder stays
            locked until the last worker is gone.
        cpu_jobs: how many jobs share a worker on the CPU; more than one is no faster, since threads
            of Python wait for each other, and is for tests.
        on_log: called with what workers log, in a thread.

    """

    def __init__(
        self, lock: int | None = None, cpu_jobs: int = 1, on_log: Callable[[LogLine], None] = log
    ) -> None:
        self._lock, self._cpu_jobs, self._on_log = lock, cpu_jobs, on_log
        self._workers: list[Worker] = []

    def prepare(self, out: Path, where: Where) -> Sequence[str]:  # noqa: ARG002 (Ray needs it)
        """Return the devices of this machine; refuse one that is not there."""
        if where.device is not None:
            find_device(where.device)
        return find_devices(where.device, torch.cuda.device_count(), where.ranks)

    def submit(self, job: Job) -> Iterator[Event]:
        """Hand the job to a worker with room for it, or to a new one; return its events.

        Call it in a thread that outlives the job: Linux kills a worker with the thread that
        started it.
        """
        for worker in self._workers:
            if (events := worker.submit(job)) is not None:
                return events
        worker = Worker(job, self._lock, self._cpu_jobs, self._on_log)
        self._workers.append(worker)
        return cast(Iterator[Event], worker.submit(job))

    def close(self) -> None:
        """Have every worker save a checkpoint and end; an interrupt meanwhile kills them."""
        try:
            for worker in self._workers:
                worker.process.terminate()
            deadline = time.monotonic() + PATIENCE
            for worker in self._workers:
                with suppress(subprocess.TimeoutExpired):
                    worker.process.wait(max(0.0, deadline - time.monotonic()))
        finally:
            for worker in self._workers:
                worker.kill()


class Worker:
    """A process that runs jobs, each in a thread of its own, and the replies to them.

    It keeps the device and the number of threads of its first job. A job with several ranks has a
    worker of its own, which is torchrun. The other arguments are those of `LocalExecutor`.
    """

    def __init__(
        self, job: Job, lock: int | None, cpu_jobs: int, on_log: Callable[[LogLine], None]
    ) -> None:
        where = job.where
        self._device, self._ranks, self._on_log = where.device, where.ranks, on_log
        self._room = cpu_jobs if where.device == "cpu" else round(1 / SMALLEST_SHARE)
        self._shared = True
        self._given = 0
        self._replies: dict[int, SimpleQueue[Event | Exception | str]] = {}
        """Where the replies to each running job go."""
        self._end: str | None = None
        """How the process ended."""
        self._mutex = Lock()
        self.process = subprocess.Popen(
            [sys.executable, "-c", *(_launch(job) if where.ranks > 1 else (WORKER,))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[] if lock is None else [lock],
            env=_environment(where),
        )
        self._reader = Thread(target=self._read, daemon=True)
        self._reader.start()

    def submit(self, job: Job) -> Iterator[Event] | None:
        """Send the job and return its events; None if this worker is not for it, or has no room."""
        shares = can_share_process(job.recipe) and not job.alone
        with self._mutex:
            number = self._given
            if number and not self._has_room(job, shares):
                return None
            self._given += 1
            self._shared = shares
            self._replies[number] = SimpleQueue()
            if self._end is not None:  # it has died already
                self._replies[number].put(self._end)
        if self._ranks == 1:
            stdin = cast(IO[bytes], self.process.stdin)
            with suppress(BrokenPipeError):  # it is dead, which `_read` finds
                pickle.dump((number, job), stdin)
                stdin.flush()
        return self._events(job, number)

    def _has_room(self, job: Job, shares: bool) -> bool:
        """Return whether the process can run one more job."""
        if self._end is not None or self.process.poll() is not None:
            return False
        if self._ranks > 1 or job.where.ranks > 1 or job.where.device != self._device:
            return False
        running = len(self._replies)
        return not running or (self._shared and shares and running < self._room)

    def _events(self, job: Job, number: int) -> Iterator[Event]:
        while isinstance(reply := self._replies[number].get(), Record):
            yield reply
        with self._mutex:
            del self._replies[number]
        if isinstance(reply, str):
            self.kill()
            raise WorkerDied(job.name, reply)
        if self._ranks > 1:
            self._close_stdin()
            self.process.wait()
            self.kill()
        if isinstance(reply, Exception):
            raise reply
        yield reply

    def _read(self) -> None:
        """Put each reply into its job's queue; at the end put how the process ended into all."""
        stdout = cast(IO[bytes], self.process.stdout)
        with suppress(EOFError, pickle.UnpicklingError):
            while True:
                number, reply = pickle.load(stdout)  # noqa: S301 (ours)
                if isinstance(reply, LogLine):
                    self._on_log(reply)
                else:
                    self._replies[number].put(reply)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(PATIENCE)
        self.process.kill()  # one that does not end
        end = describe_exit(self.process.wait())
        with self._mutex:
            self._end = end
            for replies in self._replies.values():
                replies.put(end)

    def _close_stdin(self) -> None:
        with suppress(BrokenPipeError):
            cast(IO[bytes], self.process.stdin).close()

    def kill(self) -> None:
        """End the process at once, and close its pipes."""
        self.process.kill()
        self._close_stdin()
        self.process.wait()
        self._reader.join(PATIENCE)
        cast(IO[bytes], self.process.stdout).close()


def _launch(job: Job) -> tuple[str, ...]:
    """Return the words after ``python -c`` that start a job on several ranks.

    Ranks see only the GPUs of the job (`_environment`), so its device is "cuda".
    """
    device = job.where.device if job.where.device == "cpu" else "cuda"
    sent = pickle.dumps(replace(job, where=replace(job.where, device=device)))
    return (
        *(TORCHRUN, "--standalone", f"--nproc-per-node={job.where.ranks}"),
        "--signals-to-handle=SIGTERM",
        *("--no-python", sys.executable, "-c", WORKER, b64encode(sent).decode()),
    )


def _environment(where: Where) -> dict[str, str]:
    """Return the environment of a worker: its number of threads, and the GPUs of its ranks."""
    changes = {"OMP_NUM_THREADS": str(where.threads)} if where.threads else {}
    if where.ranks > 1 and where.device is not None and where.device.startswith("cuda:"):
        chosen = where.device.removeprefix("cuda:")
        if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
            names = visible.split(",")
            chosen = ",".join(names[int(number)] for number in chosen.split(","))
        changes["CUDA_VISIBLE_DEVICES"] = chosen
    return {**os.environ, **changes}
