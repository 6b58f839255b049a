"""`train`: one run, from its recipe to its summary."""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, nullcontext
from pathlib import Path
from typing import get_args

import torch

from ghostbatch.data import Data, OnBadImage, check_limit, load, open_feed
from ghostbatch.data.skipped import BAD_IMAGE_LIMIT
from ghostbatch.diagnostics import DistanceScheduler
from ghostbatch.errors import (
    InputError,
    check_choice,
    check_is,
    check_positive,
    check_positive_or_none,
    check_seconds,
)
from ghostbatch.files import locked
from ghostbatch.nn import to_cross_rank
from ghostbatch.recipe import Plan, Recipe
from ghostbatch.recipes import find_recipe
from ghostbatch.train.capture import choose_update
from ghostbatch.train.device import (
    LAUNCHES,
    READ_EVERY,
    check_threads,
    cudnn_choice,
    find_device,
    thread_count,
)
from ghostbatch.train.evaluate import check_outputs
from ghostbatch.train.explain import explain_faults
from ghostbatch.train.folder import RunFolder
from ghostbatch.train.journal import Journal, schedule
from ghostbatch.train.measure import check_measures, make_measures
from ghostbatch.train.ranks import TIMEOUT, Ranks, joined
from ghostbatch.train.record import OnProgress, OnRecord, Summary
from ghostbatch.train.reference import read_drop_targets
from ghostbatch.train.signals import Signals
from ghostbatch.train.split import memory_remedy, split_batch
from ghostbatch.train.state import State, can_share_process, image_format, use_gpu_layers
from ghostbatch.train.temporary import temporary_folder
from ghostbatch.train.update import Update

DOWNLOAD_TIMEOUT = 24 * 3600.0
"""Seconds that the other ranks wait for one that downloads the data."""


def train(
    recipe: Recipe | str,
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
    bad_image_limit: float = BAD_IMAGE_LIMIT,
    capture: bool = True,
    deterministic: bool = False,
    noise_scale: bool = False,
    sharpness: bool = False,
    on_record: OnRecord | None = None,
    on_progress: OnProgress | None = None,
    should_stop: Callable[[], bool] | None = None,
    timeout: float = TIMEOUT,
) -> Summary:
    """Run a recipe to its end, or continue the run that its folder holds; return the summary.

    Under torchrun, or inside a process group, this is one run on all ranks, with the same numbers
    as on one rank. After a SIGINT, SIGTERM, SIGHUP or SIGUSR1 the run finishes its update (several
    GPUs: at most `READ_EVERY` updates), saves and stops; a second signal stops it at once.

    Args:
        recipe: decides every number; or the name of a recipe, such as "f1-digits".
        out: folder of the run, on the first rank; None uses a temporary one.
        device: "cpu", "cuda", ...; None is the GPU if there is one, one for each rank.
        micro: samples per backward pass, over all ranks; saves memory, keeps the numbers.
        threads: CPU threads; a resumed run keeps the number it began with.
        evaluations: evenly spaced evaluations; four more per decade of updates cover the start.
        checkpoint_seconds: time between checkpoints.
        checkpoint_updates: updates between checkpoints, if that comes earlier.
        data_dir: folder of the data sets; None is GHOSTBATCH_DATA, or ``data`` here.
        download: download the data set if it is missing.
        workers: processes that decode the images of a folder.
        on_bad_image: "fatal" ends the run at an unreadable image; "skip" warns and takes another.
        bad_image_limit: largest fraction of the images, of each part, that may be skipped; 0.01
            by default.
        capture: on one GPU, run updates as CUDA graphs; turn it off for networks that decide on
            the host what their forward does.
        deterministic: on a GPU, use only algorithms that repeat their bits; slower.
        noise_scale: at each evaluation, also measure the gradient noise scale, from 8 to 64 ghosts
            (batches of plain batch norm) that follow: a thousandth of the run's images, if it can.
        sharpness: at each evaluation, also measure the largest eigenvalue of the Hessian of the
            loss over a thousand training images, which takes some ten updates of that batch.
        on_record: called on the first rank with every record of ``metrics.jsonl``.
        on_progress: called on the first rank before the first update and then at least every
            `READ_EVERY` updates; not called if the run had ended already.
        should_stop: asked between updates, for runs in threads, which receive no signals; True
            saves a checkpoint and raises `ghostbatch.stop.Stopped`.
        timeout: seconds that ranks wait for each other before the run ends; inside a process group
            that exists already, its own time-out counts.

    """
    recipe = find_recipe(recipe) if isinstance(recipe, str) else recipe
    if not isinstance(recipe, Recipe):
        raise InputError("recipe", f"{recipe!r} is neither a Recipe nor a name", "pass either")
    where = find_device(device)
    check_positive(evaluations=evaluations, workers=workers)
    check_positive_or_none(threads=threads, checkpoint_updates=checkpoint_updates)
    check_threads(threads)
    check_seconds(checkpoint_seconds=checkpoint_seconds)
    check_choice("on_bad_image", on_bad_image, get_args(OnBadImage))
    check_limit(bad_image_limit)
    calls = {"on_record": on_record, "on_progress": on_progress, "should_stop": should_stop}
    for name, call in calls.items():
        if call is not None and not callable(call):
            raise InputError(name, f"{call!r} cannot be called", "give a function, or None")
    if out is not None:
        check_is("out", out, (str, os.PathLike), "a path")
    if out == "":  # Python takes it for the current folder
        raise InputError("out", "the path is empty", "name a folder, or use None")
    if not (isinstance(timeout, int | float) and 1 <= timeout <= 1e6):
        raise InputError("timeout", f"{timeout} is no time to wait", "use 1 to 1e6 seconds")
    generators = [] if where.type == "cpu" else [where]
    with (
        joined(where, timeout) as ranks,
        torch.random.fork_rng(devices=generators, enabled=not can_share_process(recipe)),
        cudnn_choice(deterministic),
        torch.inference_mode(False),  # which also turns gradients on
    ):
        data = _load(recipe, data_dir, download, ranks)
        plan = recipe.plan(data.info.samples)
        problem = f"{recipe.model} does not fit into the memory of {where}"
        with explain_faults("model", problem, "use a smaller network, or another device"):
            state = State(plan, data.info, where)
            split = split_batch(recipe, state.model, micro, ranks.world)
            check_measures(noise_scale, sharpness, recipe, data, split)
            check_outputs(state, split)
        state.skipped.limit = bad_image_limit
        with _open_folder(plan, out, ranks) as folder:
            if (ended := ranks.on_rank_zero(folder.summary)) is not None:
                return ended
            if split.needs_full_batch and ranks.world > 1:
                to_cross_rank(state.model)
            if where.type == "cuda":
                use_gpu_layers(state.model, recipe, one_rank=ranks.world == 1)
            # These may refuse; nothing is written before.
            ranks.on_rank_zero(lambda: folder.check_unchanged(where, data, split.micro))
            kept_bytes = _restore(state, folder, ranks)
            with explain_faults("data", *_data_does_not_fit(recipe, where)):
                feed = open_feed(
                    data,
                    workers=workers,
                    on_bad_image=on_bad_image,
                    skipped=state.skipped,
                    batch=recipe.batch,
                    seed=recipe.seed,
                    augment=recipe.augment,
                    device=where,
                    **image_format(state.model, recipe, where),
                )
            kind = choose_update(state, feed, ranks, capture)
            count = threads or torch.get_num_threads()
            how: dict[str, int | str] = {"micro": split.micro, "evaluations": evaluations}
            how |= {"noise_scale": noise_scale, "sharpness": sharpness, "engine": kind.engine}
            run = state, feed, split, ranks
            problem = f"{split.shard} samples at a time do not fit into this device's memory"
            with (
                explain_faults("micro", problem, memory_remedy(split)),
                closing(feed),
                thread_count(ranks.on_rank_zero(lambda: folder.begin(where, count, data, **how))),
                closing(kind(*run)) as update,
                closing(
                    Journal(
                        *(*run, folder, kept_bytes),
                        make_measures(noise_scale, sharpness, update, data),
                        checkpoint_seconds=checkpoint_seconds,
                        checkpoint_updates=checkpoint_updates,
                        on_record=on_record,
                        on_progress=on_progress,
                    )
                ) as journal,
                Signals(ranks.world > 1, should_stop) as signals,
            ):
                return _run(update, journal, signals, evaluations)


def _run(update: Update, journal: Journal, signals: Signals, evaluations: int) -> Summary:
    """Update until the end; log, evaluate and save on the way; return the summary."""
    state = update.state
    log_updates, eval_updates = schedule(state.plan, evaluations)
    read_every = min(most := READ_EVERY[state.device.type], journal.checkpoint_updates or most)
    journal.show_progress(update.engine)
    if state.update == 0:
        journal.record_validation()
    while state.update < state.end:
        log = _advance(update, signals, log_updates, read_every)
        reading = state.monitor.read()
        if reading.problem is not None:
            return journal.give_up(reading, update)
        journal.show_progress(update.engine)
        if log:
            journal.record_training()
        last = state.update == state.end  # its evaluation follows the checkpoint
        if state.update in eval_updates and not last:
            journal.record_validation()
        if reading.stop:
            journal.save()
            signals.raise_noted()
        journal.save_if_due(next_chance=read_every)
    journal.save()
    return journal.end()


def _advance(update: Update, signals: Signals, log_updates: set[int], read_every: int) -> bool:
    """Run updates until the monitor is to be read; return whether the last of them is logged.

    On a GPU, runs in other threads of this process launch nothing meanwhile. Threads that launch at
    the same time hand Python's lock to each other at every operation, which takes longer.
    """
    state = update.state
    with LAUNCHES if state.device.type == "cuda" else nullcontext():
        while True:
            stop = signals.stop
            update(stop=stop)
            last = state.update == state.end
            if last or state.update in log_updates or state.update in state.drops:
                return True
            stop = stop and update.ranks.world == 1  # with more, all must read at the same update
            if stop or state.update % read_every == 0:
                return False


def _restore(state: State, folder: RunFolder, ranks: Ranks) -> int:
    """Load the newest checkpoint if there is one; return the length that metrics.jsonl had then."""
    saved = ranks.on_rank_zero(folder.checkpoint)
    if saved is not None:
        state.load_state_dict(saved["state"])
        return int(saved["metrics"])
    if isinstance(state.scheduler, DistanceScheduler):
        targets = ranks.on_rank_zero(lambda: read_drop_targets(state.plan))
        state.scheduler.follow(state.plan.regime, *targets)
    return 0


def _load(recipe: Recipe, data_dir: str | Path | None, download: bool, ranks: Ranks) -> Data:
    """Load the data set on every rank; one rank of each machine downloads it first if asked to."""
    if download and ranks.world > 1:
        downloads = os.environ.get("LOCAL_RANK", "0") == "0"
        ranks.all_or_none(
            lambda: load(recipe.data, data_dir, True) if downloads else None, DOWNLOAD_TIMEOUT
        )
        download = False

    def ask() -> Data:
        with explain_faults("data", *_data_does_not_fit(recipe, torch.device("cpu"))):
            return load(recipe.data, data_dir, download, **recipe.data_options)

    return ranks.all_or_none(ask)


def _data_does_not_fit(recipe: Recipe, device: torch.device) -> tuple[str, str]:
    """Return the problem and the remedy of a data set that is too large."""
    return (
        f"{recipe.data} does not fit into the memory of {device}",
        "use a device with more memory, or read its images from a folder (folder:PATH)",
    )


@contextmanager
def _open_folder(plan: Plan, out: str | Path | None, ranks: Ranks) -> Iterator[RunFolder]:
    """Yield the run's folder, locked by the first rank; a temporary one if ``out`` is None."""
    with ExitStack() as stack:

        def open_it() -> RunFolder:
            if out is None:
                return RunFolder(stack.enter_context(temporary_folder()), plan)
            folder = RunFolder(Path(out), plan)
            if plan.recipe.hold == "distance" and not folder.begun():
                read_drop_targets(plan)  # may refuse; the folder does not exist yet
            lock = stack.enter_context(locked(folder.path))
            folder = RunFolder(Path(out), plan, lock)  # another run may have used it until now
            folder.repair()
            return folder

        yield ranks.on_rank_zero(open_it)
