"""The story of one run."""

import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from math import isfinite
from pathlib import Path

import torch

from ghostbatch.data import load
from ghostbatch.diagnostics import log_spaced
from ghostbatch.errors import InputError
from ghostbatch.recipe import Plan, Recipe
from ghostbatch.train.files import locked
from ghostbatch.train.folder import RunFolder
from ghostbatch.train.record import OnRecord, Summary
from ghostbatch.train.session import Session

DEVICES = ("cpu", "cuda", "mps")


def train(
    recipe: Recipe,
    *,
    out: str | Path | None = None,
    device: str | torch.device | None = None,
    threads: int | None = None,
    evaluations: int = 20,
    checkpoint_seconds: float = 30.0,
    on_record: OnRecord | None = None,
) -> Summary:
    """Run a recipe to its end, or go on with it where the folder says that it stopped.

    Args:
        recipe: decides every number.
        out: the run's folder; without one nothing is kept.
        device: "cpu", "cuda", ...; the GPU if there is one.
        threads: for the CPU's arithmetic; a resumed run keeps those it began with.
        evaluations: how often the test set is looked at, evenly over the updates; it is looked
            at four times per factor of ten in updates as well, so that the beginning is seen.
        checkpoint_seconds: time between checkpoints.
        on_record: called with every record that goes to ``metrics.jsonl``.

    """
    where = find_device(device)
    if threads is not None and threads < 1:
        raise InputError("threads", f"{threads} is below 1", "use 1 or more")
    if evaluations < 1:
        raise InputError("evaluations", f"{evaluations} is below 1", "use 1 or more")
    data = load(recipe.data)
    plan = recipe.plan(len(data.train))
    looks = _evenly(plan.updates, evaluations) | set(log_spaced(plan.updates, per_decade=4))
    looks.discard(plan.updates)  # the end is looked at once, when its checkpoint is safe
    notes = looks | set(log_spaced(plan.updates))

    with _folder_of(plan, out) as folder, _own_draws(where):
        if (ended := folder.summary()) is not None:
            return ended
        saved = folder.load(where)  # refused, if it must be, before anything is written
        with (
            _threads(folder.begin(where, threads or torch.get_num_threads())),
            closing(Session(plan, data, folder, where, saved, on_record)) as session,
        ):
            state = session.state
            if state.update == 0:
                session.record_validation()
            while state.update < plan.updates:
                session.step()
                if state.update in notes and not isfinite(session.record_training().loss):
                    return session.end(session.record_validation())
                if state.update in looks:
                    session.record_validation()
                session.save(every=checkpoint_seconds)
            session.save()
            return session.end(session.record_validation())


def find_device(name: str | torch.device | None) -> torch.device:
    """The device asked for, or else the GPU if there is one."""
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
        usable = device.type in DEVICES
    except (RuntimeError, AssertionError):  # how PyTorch says no depends on its build
        usable = False
    if not usable:
        raise InputError("device", f"{name} is not available here", "use cpu")
    return device


def _evenly(updates: int, times: int) -> set[int]:
    return {round(updates * k / times) for k in range(1, times + 1)}


@contextmanager
def _folder_of(plan: Plan, out: str | Path | None) -> Iterator[RunFolder]:
    """The run's own folder, locked; a passing one if nothing is to be kept."""
    if out is None:
        with tempfile.TemporaryDirectory() as passing:
            yield RunFolder(Path(passing), plan)
    else:
        folder = RunFolder(Path(out), plan)
        with locked(folder.path):
            yield folder


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """Compute with so many threads: another number would round differently."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _own_draws(device: torch.device) -> Iterator[None]:
    """Leave the caller's random state as it was."""
    with torch.random.fork_rng(devices=[] if device.type == "cpu" else [device]):
        yield
