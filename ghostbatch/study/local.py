"""Runs jobs in worker processes of this machine."""

import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from queue import SimpleQueue
from threading import Thread
from typing import IO, Any, cast

from ghostbatch.errors import InputError
from ghostbatch.study.executor import Event, Job, WorkerDied
from ghostbatch.train import Record, Summary

PATIENCE = 20.0
"""Seconds that workers get for their last checkpoint."""


class LocalExecutor:
    """Starts a worker process per job that runs side by side, and reuses it for the next job.

    Args:
        lock: descriptor of the study's lock. Workers inherit it, so the study's folder stays
            locked until the last worker is gone.

    """

    def __init__(self, lock: int) -> None:
        self._lock = lock
        self._workers: list[Worker] = []
        self._idle: defaultdict[str | None, list[Worker]] = defaultdict(list)  # by their device

    def submit(self, job: Job) -> Iterator[Event]:
        """Hand the job to an idle worker of its device, or to a new one; return its events."""
        idle = self._idle[job.where.device]
        if idle:
            worker = idle.pop()
        else:
            worker = Worker(self._lock)
            self._workers.append(worker)
        worker.send(job)
        return self._events(job, worker)

    def _events(self, job: Job, worker: "Worker") -> Iterator[Event]:
        while (reply := worker.replies.get()) is not None:
            match reply:
                case {"record": fields}:
                    yield Record(**fields)
                case {"summary": fields}:
                    self._idle[job.where.device].append(worker)
                    yield Summary(**fields)
                    return
                case {"refused": parts}:
                    raise InputError(*parts)
                case {"failed": parts}:
                    raise OSError(*parts)
        raise WorkerDied(job)

    def close(self) -> None:
        """Have every worker save a checkpoint and end; an interrupt meanwhile kills them."""
        try:
            for worker in self._workers:
                worker.terminate()
            deadline = time.monotonic() + PATIENCE
            for worker in self._workers:
                worker.wait(deadline - time.monotonic())
        finally:
            for worker in self._workers:
                worker.kill()


class Worker:
    """A process of `ghostbatch.study.worker`."""

    def __init__(self, lock: int) -> None:
        self.replies: SimpleQueue[dict[str, Any] | None] = SimpleQueue()
        """What the worker answered; None once it is gone."""
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

    def send(self, job: Job) -> None:
        """Hand over a job; if the worker is dead, the next reply is None."""
        with suppress(BrokenPipeError):
            self._stdin.write(json.dumps(job.as_dict()) + "\n")
            self._stdin.flush()

    def terminate(self) -> None:
        """Ask the process to end; a job that is running saves a checkpoint first."""
        self._process.terminate()

    def wait(self, seconds: float) -> None:
        """Wait for the process to end, at most ``seconds``."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(max(0.0, seconds))

    def kill(self) -> None:
        """End the process at once; its job continues from the last checkpoint next time."""
        self._process.kill()
        self._process.wait()
        self._listener.join()
        for pipe in (self._stdin, self._stdout):
            with suppress(BrokenPipeError):  # of a job that was not read
                pipe.close()

    def _listen(self) -> None:
        for line in self._stdout:
            self.replies.put(json.loads(line))
        self.replies.put(None)
