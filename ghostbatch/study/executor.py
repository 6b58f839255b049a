"""Jobs, and the interface of what runs them.

`LocalExecutor` runs them in processes of this machine, and `RayExecutor` on a Ray cluster. Another
executor is one more class with the three methods of `Executor`.
"""

import signal
from collections.abc import Callable, Iterator, Sequence
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
    noise_scale: bool = False
    """At each evaluation, also measure the gradient noise scale."""
    sharpness: bool = False
    """At each evaluation, also measure the sharpness of the training loss."""
    ranks: int = 1
    """Processes that compute a cell together, each on its own GPU; torchrun starts them."""

    def micro_of(self, recipe: Recipe) -> int | None:
        """Return `micro` if the recipe has ghosts and a larger batch, else None."""
        return self.micro if self.micro and recipe.ghost and recipe.batch > self.micro else None


@dataclass(frozen=True)
class Job:
    """One run of a study: what it computes, in which folder, and where. It can be pickled."""

    name: str
    """What messages call the job."""
    recipe: Recipe
    folder: Path
    where: Where
    share: float = 1.0
    """Share of a GPU that it needs, if it runs on one."""
    alone: bool = False
    """Whether it needs a process of its own, because a worker has died that ran it."""
    evaluations: int = 20
    """Evenly spaced evaluations of the run."""

    def run(self, on_record: OnRecord, should_stop: Callable[[], bool] | None = None) -> Summary:
        """Train in this process, or continue from the folder's checkpoint."""
        options = asdict(self.where)
        del options["ranks"]  # `train` finds them by itself
        options |= {"evaluations": self.evaluations, "on_record": on_record}
        return train(self.recipe, out=self.folder, should_stop=should_stop, **options)


class Executor(Protocol):
    """Runs jobs side by side."""

    def prepare(self, out: Path, where: Where) -> Sequence[str]:
        """Return the devices for the jobs of a study in the folder ``out``.

        Refuse what cannot run there; nothing is written before.
        """

    def submit(self, job: Job) -> Iterator[Event]:
        """Start a job and return its events as they come; the last one is its `Summary`.

        Another thread may consume the iterator. It raises `InputError` or `OSError` if the job did,
        and `WorkerDied` if the process that ran it is gone.
        """

    def close(self) -> None:
        """End all workers; running jobs save a checkpoint first."""


def forward(events: Iterator[Event], put: Callable[[Event | Exception | None], None]) -> None:
    """Pass the events of a job on; at the end None, or the exception that it raised."""
    try:
        for event in events:
            put(event)
        put(None)
    except Exception as error:  # for the thread that reads them to handle
        put(error)


class WorkerDied(RuntimeError):  # noqa: N818 (says what happened)
    """The process of the job ``name`` ended without an answer; ``how`` tells its exit code."""

    def __init__(self, name: str, how: str) -> None:
        super().__init__(name, how)
        self.name, self.how = name, how

    def __str__(self) -> str:
        return f"the worker for {self.name} died ({self.how})"


def describe_exit(code: int) -> str:
    """Return the exit code of a process in words; a negative one is the number of a signal.

    >>> describe_exit(1), describe_exit(-9), describe_exit(-99)
    ('exit code 1', 'SIGKILL', 'signal 99')
    """
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
