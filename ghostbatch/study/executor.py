"""Jobs, and the interface of whatever runs them.

`ghostbatch.study.local.LocalExecutor` runs them in processes of this machine. Another executor (a
cluster, say) is one more class with these two methods.
"""

import signal
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from ghostbatch.recipe import Recipe
from ghostbatch.train import OnRecord, Record, Summary, train

Event = Record | Summary
"""A job yields records while it runs, and its summary at the end."""


class LogLine(NamedTuple):
    """What a worker logged, for the study's process to log."""

    level: int
    text: str


@dataclass(frozen=True)
class Failure:
    """A cell or an instrument of a study that has no result."""

    name: str
    reason: str
    """One line."""


@dataclass(frozen=True, kw_only=True)
class Where:
    """Where and how a job runs: arguments of `train` that do not change its numbers."""

    device: str | None = None
    """cpu, cuda:1, ...; None and cuda are every GPU; None is the CPU if there is no GPU."""
    threads: int | None = 1
    """CPU threads; None is PyTorch's choice."""
    micro: int | None = None
    """Samples per backward pass of cells with ghosts and a larger batch; None is the batch."""
    data_dir: str | None = None
    """Folder of the data sets; None is GHOSTBATCH_DATA, or the folder data here."""
    checkpoint_seconds: float = 10.0
    """Time between checkpoints."""


@dataclass(frozen=True)
class Job:
    """One run of a study: what it computes, in which folder, and where. It can be pickled."""

    name: str
    """What messages call the job."""
    recipe: Recipe
    folder: Path
    where: Where

    def run(self, on_record: OnRecord) -> Summary:
        """Train in this process, or continue from the folder's checkpoint."""
        return train(self.recipe, out=self.folder, on_record=on_record, **asdict(self.where))


class Executor(Protocol):
    """Runs jobs side by side."""

    def submit(self, job: Job) -> Iterator[Event]:
        """Start a job and return its events as they come; the last one is its `Summary`.

        The iterator may be consumed in another thread. It raises `InputError` or `OSError` if the
        job did, and `WorkerDied` if the process that ran it is gone.
        """

    def close(self) -> None:
        """End all workers; running jobs save a checkpoint first."""


class WorkerDied(RuntimeError):  # noqa: N818 (says what happened)
    """The process of a job ended without an answer: it ran out of memory, or was killed.

    Args:
        job: what it ran.
        code: its exit code, if that is known; negative is the number of a signal.

    """

    def __init__(self, job: Job, code: int | None = None) -> None:
        self.how = f"exit code {code}"
        if code is None:
            self.how = "no exit code"
        elif code < 0:
            self.how = _signal_name(-code)
        super().__init__(f"the worker for {job.name} died ({self.how})")


def _signal_name(number: int) -> str:
    """Return the name of a signal.

    >>> _signal_name(9), _signal_name(99)
    ('SIGKILL', 'signal 99')
    """
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
