"""A process that runs cells for a study: jobs come in on stdin, records go out on stdout.

It lives as long as its stdin is open. The study holds the other end, so whatever ends the study,
kill -9 included, ends its workers too; the cell they were at goes on from its checkpoint next time.
"""

import json
import os
import signal
import sys
from dataclasses import asdict
from queue import SimpleQueue
from threading import Thread
from typing import Any

from ghostbatch.errors import InputError
from ghostbatch.recipe import Recipe
from ghostbatch.train import train


def main() -> None:
    """Run jobs until there are no more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the study to handle
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # nobody's print may mix with the replies

    def reply(**message: Any) -> None:
        replies.write(json.dumps(message) + "\n")

    jobs: SimpleQueue[str] = SimpleQueue()
    Thread(target=_listen, args=(jobs,), daemon=True).start()
    while True:
        job = json.loads(jobs.get())
        try:
            summary = train(
                Recipe.from_dict(job.pop("recipe")),
                **job,
                on_record=lambda record: reply(record=asdict(record)),
            )
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
