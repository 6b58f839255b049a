"""The worker process of a study: reads jobs from stdin, writes their events to stdout.

It ends when its stdin closes. The study holds the other end, so its workers end with it, even
after kill -9. The job that was running continues from its checkpoint next time.
"""

import json
import os
import signal
import sys
from dataclasses import asdict
from queue import SimpleQueue
from threading import Thread
from typing import Any

import torch

from ghostbatch.errors import InputError
from ghostbatch.study.executor import Job


def main() -> None:
    """Run jobs until stdin closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the study handles Ctrl-C
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # so that no print mixes with the replies

    def reply(**message: Any) -> None:
        replies.write(json.dumps(message) + "\n")

    jobs: SimpleQueue[str] = SimpleQueue()
    Thread(target=_listen, args=(jobs,), daemon=True).start()
    while True:
        line = jobs.get()
        try:
            summary = Job.from_dict(json.loads(line)).run(
                lambda record: reply(record=asdict(record))
            )
            if torch.cuda.is_initialized():
                torch.cuda.empty_cache()  # other workers may share this GPU
            reply(summary=asdict(summary))
        except InputError as error:
            reply(refused=[error.field, error.problem, error.remedy])
        except BrokenPipeError:  # the study is gone
            return
        except OSError as error:
            reply(failed=[error.errno, error.strerror, error.filename])


def _listen(jobs: SimpleQueue[str]) -> None:
    for line in sys.stdin:
        jobs.put(line)
    os._exit(0)


if __name__ == "__main__":
    main()
