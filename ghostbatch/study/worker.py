"""The worker process of a study: reads pickled jobs from stdin, writes their events to stdout.

`ghostbatch.study.local` starts it. Each job runs in a thread, so that several can share a GPU. At
SIGTERM all of them save a checkpoint and end. The process ends when its stdin closes, and so with
the study that holds the other end, even after kill -9. Under torchrun it is one rank of one job,
which is its argument, and the first rank writes the events.

What threads share:

- PyTorch's default generators: see `can_share_process`.
- Signals reach the main thread only, which sets a flag that runs ask for (``should_stop``).
- cuDNN's flags and the number of threads: every run sets and restores the values with which this
  process begins (`cudnn_choice` below, OMP_NUM_THREADS).
- A GPU: captures of graphs, `empty_cache` and the building of networks take turns (`PROCESS`), and
  each job has its stream.
- Filters of warnings: after two threads have ignored warnings at the same time (`read_checkpoint`),
  later ones may be lost. No number depends on them.
- Kernels: a backend that breaks in one run is replaced in all (`ops.backends.select`).
- A crash of the process ends all of its jobs. Each continues in a worker of its own.
"""

import logging
import os
import pickle
import signal
import sys
import traceback
import warnings
from base64 import b64decode
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from queue import SimpleQueue
from threading import Event as Flag
from threading import RLock, Thread
from typing import Any

import torch

from ghostbatch.errors import InputError, RankError, one_line, portable
from ghostbatch.stop import Stopped
from ghostbatch.study.executor import Event, Job, LogLine
from ghostbatch.train import find_device
from ghostbatch.train.device import PROCESS, cudnn_choice

Reply = Callable[[int, Event | LogLine | Exception], None]
"""Sends a message about the job of a number."""


def main() -> None:
    """Run jobs until stdin closes or SIGTERM comes."""
    ranked = [pickle.loads(b64decode(word)) for word in sys.argv[1:]]  # noqa: S301 (the study's)
    jobs: SimpleQueue[tuple[int, Job] | None] = SimpleQueue()
    signal.signal(signal.SIGTERM, lambda *_: jobs.put(None))
    reply = _open_replies()
    _forward_log(reply)
    for job in ranked:
        jobs.put((0, job))
    Thread(target=_listen, args=(jobs,), daemon=True).start()
    stop, threads = Flag(), []
    streams: list[Any] = []  # CUDA streams that no job uses

    def work(number: int, job: Job) -> None:
        _run(number, job, reply, stop, streams)
        if ranked:  # torchrun waits for the end of the process
            jobs.put(None)

    with cudnn_choice(deterministic=False):
        while (numbered := jobs.get()) is not None:
            threads.append(Thread(target=work, args=numbered, daemon=True))
            threads[-1].start()
        stop.set()
        for thread in threads:
            thread.join()
    os._exit(0)  # an ordinary exit would wait for the thread that reads stdin


def _open_replies() -> Reply:
    """Return the function that sends replies: through stdout, for the first rank only."""
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # so that no print mixes with the replies
    is_first = os.environ.get("RANK", "0") == "0"
    lock = RLock()  # a thread of PyTorch's may log

    def reply(number: int, message: Event | LogLine | Exception) -> None:
        if is_first:
            with lock:
                pickle.dump((number, message), replies)
                replies.flush()

    return reply


def _run(number: int, job: Job, reply: Reply, stop: Flag, streams: list[Any]) -> None:
    """Run a job; reply with its records, and then with its summary or the error that it raised."""
    try:
        with _own_stream(job, streams):
            summary = job.run(lambda record: reply(number, record), stop.is_set)
        reply(number, summary)
    except Stopped:
        return
    except BrokenPipeError:  # the study is gone
        os._exit(0)
    except RankError:  # torchrun tells which rank was lost
        os._exit(1)
    except (InputError, OSError) as error:
        _release(error)
        reply(number, portable(error))
    except BaseException:  # a fault; on a GPU nothing can be trusted after some of them
        traceback.print_exc()
        os._exit(1)


def _release(error: Exception) -> None:
    """Free what the frames of an error hold, such as the memory of a job that ran out of it."""
    for each in (error, error.__cause__, error.__context__):
        if each is not None:
            traceback.clear_frames(each.__traceback__)
    if torch.cuda.is_initialized():
        with PROCESS:
            torch.cuda.empty_cache()


@contextmanager
def _own_stream(job: Job, streams: list[Any]) -> Iterator[None]:
    """On a GPU, run in a stream that no other job uses; at the end give its memory back.

    A rank needs none, since it has its process to itself.
    """
    device = find_device(job.where.device)
    if device.type != "cuda" or job.where.ranks > 1:
        yield
        return
    stream = streams.pop() if streams else torch.cuda.Stream(device)
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        streams.append(stream)
        with PROCESS:
            torch.cuda.empty_cache()


def _forward_log(reply: Reply) -> None:
    """Reply with what this package logs, from level INFO on, and with every warning."""

    class Forward(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            with suppress(BrokenPipeError):  # the study is gone, which the next reply notices
                reply(0, LogLine(record.levelno, record.getMessage()))

    logger = logging.getLogger("ghostbatch")
    logger.setLevel(logging.INFO)
    logger.addHandler(Forward())

    def log_warning(message: Warning | str, *_: Any, **__: Any) -> None:
        logger.warning(one_line(message))

    warnings.showwarning = log_warning


def _listen(jobs: SimpleQueue[tuple[int, Job] | None]) -> None:
    try:
        while True:
            jobs.put(pickle.load(sys.stdin.buffer))  # noqa: S301 (from the study)
    except (EOFError, pickle.UnpicklingError):  # the second in the middle of a job
        os._exit(0)
