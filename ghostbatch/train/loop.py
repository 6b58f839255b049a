"""The story of one run."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from ghostbatch.data import Data, OnBadImage, load, open_feed
from ghostbatch.diagnostics import log_spaced
from ghostbatch.errors import InputError, RankLocalError
from ghostbatch.files import locked
from ghostbatch.nn import to_cross_rank
from ghostbatch.recipe import Plan, Recipe
from ghostbatch.train.folder import RunFolder
from ghostbatch.train.ranks import Ranks, joined
from ghostbatch.train.record import OnRecord, Summary
from ghostbatch.train.reference import read_drop_targets
from ghostbatch.train.session import Interval, Session
from ghostbatch.train.signals import Signals
from ghostbatch.train.split import split_batch
from ghostbatch.train.state import State, parameter_dtype

DEVICES = ("cpu", "cuda")


def train(
    recipe: Recipe,
    *,
    out: str | Path | None = None,
    device: str | torch.device | None = None,
    micro: int | None = None,
    threads: int | None = None,
    evaluations: int = 20,
    checkpoint_seconds: float = 30.0,
    checkpoint_updates: int | None = None,
    data_dir: str | Path | None = None,
    download: bool = False,
    workers: int = 2,
    on_bad_image: OnBadImage = "fatal",
    on_record: OnRecord | None = None,
) -> Summary:
    """Run a recipe to its end, or go on with it where the folder says that it stopped.

    Started by torchrun, or inside a process group, it is one run on all ranks, with the numbers
    that it would have on one. A SIGINT or SIGTERM is answered when the update at hand is done and
    saved; a second one at once.

    Args:
        recipe: decides every number.
        out: the run's folder; without one nothing is kept. The first rank reads and writes it.
        device: "cpu", "cuda", ...; the GPU if there is one, each rank its own.
        micro: samples per backward pass, over all ranks; less memory for the same numbers.
        threads: for the CPU's arithmetic; a resumed run keeps those it began with.
        evaluations: how often the test set is looked at, evenly over the updates; it is looked
            at four times per factor of ten in updates as well, so that the beginning is seen.
        checkpoint_seconds: time between checkpoints.
        checkpoint_updates: at most so many updates between checkpoints, besides.
        data_dir: where the data sets are; None is GHOSTBATCH_DATA, or ``data`` here.
        download: get the data set if it is not there.
        workers: processes that decode the images of a folder.
        on_bad_image: a file that cannot be read is "fatal", or "skip": said, and replaced.
        on_record: called, on the first rank, with every record that goes to ``metrics.jsonl``.

    """
    where = find_device(device)
    for name, value in (
        *(("threads", threads), ("evaluations", evaluations)),
        *(("checkpoint_updates", checkpoint_updates), ("workers", workers)),
    ):
        if value is not None and value < 1:
            raise InputError(name, f"{value} is below 1", "use 1 or more")
    with joined(where) as ranks, _own_draws(where):
        data = _load(recipe.data, data_dir, download, ranks)
        plan = recipe.plan(data.info.samples)
        looks = _evenly(plan.updates, evaluations) | set(log_spaced(plan.updates, per_decade=4))
        notes = looks | set(log_spaced(plan.updates))
        state = State(plan, data.info, where)
        cut = split_batch(recipe, state.model, micro, ranks.world)
        if cut.whole and ranks.world > 1:
            to_cross_rank(state.model)
        with _folder_of(plan, out, ranks) as folder:
            if (ended := ranks.on_rank_zero(folder.summary)) is not None:
                return ended
            # refused, if it must be, before anything is written
            saved = ranks.on_rank_zero(folder.checkpoint) or {"metrics": 0}
            if "state" in saved:
                state.load_state_dict(saved["state"])
            elif recipe.hold == "distance":
                state.follow(ranks.on_rank_zero(lambda: read_drop_targets(plan)))
            count = threads or torch.get_num_threads()
            checkpoints = Interval(checkpoint_seconds, checkpoint_updates)
            feed = open_feed(
                data,
                workers=workers,
                on_bad_image=on_bad_image,
                batch=recipe.batch,
                seed=recipe.seed,
                augment=recipe.augment,
                device=where,
                dtype=parameter_dtype(recipe),
            )
            going = (plan, feed, state, cut, ranks, folder, saved["metrics"], checkpoints)
            with (
                _threads(ranks.on_rank_zero(lambda: folder.begin(where, count))),
                closing(Session(*going, on_record)) as session,
                Signals(launched=ranks.world > 1) as signals,
            ):
                if state.update == 0:
                    session.record_validation()
                while state.update < state.end:
                    step = session.step(stop=signals.noted is not None)
                    if step.problem is not None:
                        return session.give_up(step.problem)
                    last = state.update == state.end
                    if last or state.update in notes or state.update in state.drops:
                        session.record_training()
                    if state.update in looks and not last:  # the end, once it is safe
                        session.record_validation()
                    session.save_if_due()
                    if step.stop:
                        session.save()
                        signals.follow()
                session.save()
                return session.end()


def find_device(name: str | torch.device | None) -> torch.device:
    """The device asked for, or else the GPU if there is one."""
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    kind, remedy = InputError, "use cpu"
    try:
        device = torch.device(name)
        if device.type == "cuda" and device.index is None and "LOCAL_RANK" in os.environ:
            name = device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            kind, remedy = RankLocalError, "use as many ranks as this machine has GPUs, or cpu"
        torch.empty(0, device=device)
        usable = device.type in DEVICES
    except (RuntimeError, AssertionError):  # how PyTorch says no depends on its build
        usable = False
    if not usable:
        raise kind("device", f"{name} is not available here", remedy)
    return device


def _load(name: str, data_dir: str | Path | None, download: bool, ranks: Ranks) -> Data:
    """The data set, on each rank; where it must be got, one rank of each machine gets it."""
    if download and ranks.world > 1:
        getter = os.environ.get("LOCAL_RANK", "0") == "0"
        ranks.all_or_none(lambda: load(name, data_dir, download=True) if getter else None)
        download = False
    return ranks.all_or_none(lambda: load(name, data_dir, download))


def _evenly(updates: int, times: int) -> set[int]:
    return {round(updates * k / times) for k in range(1, times + 1)}


@contextmanager
def _folder_of(plan: Plan, out: str | Path | None, ranks: Ranks) -> Iterator[RunFolder]:
    """The run's own folder, locked by the first rank; a passing one if nothing is to be kept."""
    with ExitStack() as held:

        def open_it() -> RunFolder:
            if out is None:
                return RunFolder(Path(held.enter_context(TemporaryDirectory())), plan)
            folder = RunFolder(Path(out), plan)
            if plan.recipe.hold == "distance" and not folder.begun():
                read_drop_targets(plan)  # refused, if it must be, before there is a folder
            held.enter_context(locked(folder.path))
            return folder

        yield ranks.on_rank_zero(open_it)


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
