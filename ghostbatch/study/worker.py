"""The worker process of a study: reads pickled jobs from stdin, writes their events to stdout.

`ghostbatch.study.local` starts it. It ends when its stdin closes. The study holds the other end, so
its workers end with it, even after kill -9; on Linux the kernel sees to that at once, also while
they import. The job that was running continues from its checkpoint next time.
"""

import os
import pickle
import signal
import sys
from queue import SimpleQueue
from threading import Thread

import torch

from ghostbatch.errors import InputError
from ghostbatch.study.executor import Event, Job
from ghostbatch.train import find_device


def main() -> None:
    """Run jobs until stdin closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the study handles Ctrl-C
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # so that no print mixes with the replies

    def reply(message: Event | Exception) -> None:
        pickle.dump(message, replies)
        replies.flush()

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


def _listen(jobs: SimpleQueue[Job]) -> None:
    try:
        while True:
            jobs.put(pickle.load(sys.stdin.buffer))  # noqa: S301 (from the study)
    except EOFError:
        os._exit(0)
