"""The worker process of a study: reads pickled jobs from stdin, writes their events to stdout.

`ghostbatch.study.local` starts it. It ends when its stdin closes. The study holds the other end, so
its workers end with it, even after kill -9; on Linux the kernel sees to that at once, also while
they import. The job that was running continues from its checkpoint next time.
"""

import logging
import os
import pickle
import signal
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from threading import RLock, Thread
from typing import Any

import torch

from ghostbatch.errors import InputError
from ghostbatch.stop import STOP_SIGNALS
from ghostbatch.study.executor import Event, Job, LogLine
from ghostbatch.train import find_device


def main() -> None:
    """Run jobs until stdin closes."""
    for number in STOP_SIGNALS:  # the study handles them, and ends its workers by SIGTERM
        if number != signal.SIGTERM:
            signal.signal(number, signal.SIG_IGN)
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # so that no print mixes with the replies

    lock = RLock()  # a thread of PyTorch's may log

    def reply(message: Event | LogLine | Exception) -> None:
        with lock:
            pickle.dump(message, replies)
            replies.flush()

    _forward_log(reply)
    jobs: SimpleQueue[Job] = SimpleQueue()
    Thread(target=_listen, args=(jobs,), daemon=True).start()
    while True:
        job = jobs.get()
        try:
            device = find_device(job.where.device)
            if device.type == "cuda":
                torch.cuda.set_device(device.index or 0)
            reply(job.run(on_record=reply))
        except BrokenPipeError:  # the study is gone
            return
        except (InputError, OSError) as error:
            reply(error)


def _forward_log(reply: Callable[[LogLine], None]) -> None:
    """Reply with what this package logs, from level INFO on, and with every warning."""

    class Forward(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            with suppress(BrokenPipeError):  # the study is gone, which the next reply notices
                reply(LogLine(record.levelno, record.getMessage()))

    logger = logging.getLogger("ghostbatch")
    logger.setLevel(logging.INFO)
    logger.addHandler(Forward())

    def log_warning(message: Warning | str, *_: Any, **__: Any) -> None:
        logger.warning(" ".join(str(message).split()))

    warnings.showwarning = log_warning


def _listen(jobs: SimpleQueue[Job]) -> None:
    try:
        while True:
            jobs.put(pickle.load(sys.stdin.buffer))  # noqa: S301 (from the study)
    except EOFError:
        os._exit(0)
