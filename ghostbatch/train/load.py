"""From the folder of a run to its network."""

import copy
import os
import warnings
from contextlib import closing
from dataclasses import dataclass
from math import isclose
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from ghostbatch.data import (
    Info,
    SkippedImages,
    find_info,
    fingerprint_of,
    load,
    open_feed,
)
from ghostbatch.errors import InputError, check_is
from ghostbatch.nn import recalibrate, to_ghost
from ghostbatch.recipe import Plan, Recipe
from ghostbatch.train.checkpoint import Checkpoints
from ghostbatch.train.evaluate import evaluate, recalibration_batches
from ghostbatch.train.explain import explain_faults
from ghostbatch.train.header import Header, check_data, read_header
from ghostbatch.train.ranks import Ranks
from ghostbatch.train.record import Summary, intact_summary
from ghostbatch.train.state import autocast, parameter_dtype, plain_model


@dataclass(frozen=True)
class SavedRun:
    """What a run folder holds of a network."""

    plan: Plan
    info: Info
    update: int
    """Updates that the network has had."""
    model: nn.Module
    """With plain norm layers, in evaluation mode, on the CPU."""
    header: Header
    """The content of ``run.json``."""

    @property
    def recipe(self) -> Recipe:
        """The recipe of the run."""
        return self.plan.recipe


class Evaluation(NamedTuple):
    """The mean loss of a network on a test set, and its accuracy in percent."""

    loss: float
    accuracy: float

    def agrees_with(self, summary: Summary) -> bool:
        """Return whether only rounding, as between two kinds of devices, tells them apart."""
        close = isclose(self.loss, summary.loss, rel_tol=1e-3, abs_tol=1e-3)
        return close and abs(self.accuracy - summary.accuracy) <= 0.1


def load_run(folder: str | Path, *, averaged: bool = False) -> nn.Module:
    """Return the trained network of a run folder: plain norms, evaluation mode, on the CPU.

    It is that of the newest intact checkpoint. A warning says so if the run has not ended. With
    ``averaged`` it has the averaged weights of a run with ``Recipe.ema``; its running statistics
    are the run's, so call `recalibrate` before you use it.
    """
    run = read_run(folder, averaged=averaged)
    if not (Path(folder) / "summary.json").exists():
        warnings.warn(
            f"{folder} has not ended; this is its network after update {run.update} of "
            f"{run.plan.updates}",
            stacklevel=2,
        )
    return run.model


def read_run(folder: str | Path, *, averaged: bool = False) -> SavedRun:
    """Read the recipe and the newest intact checkpoint of a run folder, or its averaged weights."""
    check_is("folder", folder, (str, os.PathLike), "a path")
    folder = Path(folder)
    if not (folder / "run.json").is_file():
        raise InputError("run", f"{folder} holds no run", "name the folder of one: its --out")
    header = read_header(folder)
    recipe = Recipe.from_dict(header["recipe"])
    saved = Checkpoints(folder, recipe).load()
    if saved is None:
        remedy = "run its command again to continue it"
        if intact_summary(folder / "summary.json") is not None:
            remedy = "it ended before its first checkpoint; choose another run"
        raise InputError("run", f"{folder} holds no checkpoint", remedy)
    info = _read_info(header, recipe)
    model = plain_model(recipe, info).to(parameter_dtype(recipe))
    weights = saved["state"]["model"]
    if averaged:
        if "average" not in saved["state"]:
            remedy = "leave it out, or train with ema"
            raise InputError("averaged", f"{folder} kept no average of its weights", remedy)
        average = saved["state"]["average"]
        weights |= {name: each / average["total"] for name, each in average["sums"].items()}
    try:
        model.load_state_dict(weights)
    except RuntimeError:
        raise InputError(
            "model",
            f"{recipe.model} has other parameters than the network that {folder} trained",
            "restore it as it was then",
        ) from None
    plan = recipe.plan(int(header["samples"]))
    return SavedRun(plan, info, int(saved["state"]["update"]), model.eval(), header)


def _read_info(header: dict[str, Any], recipe: Recipe) -> Info:
    """Return the sizes of the run's data, from its header if that has them."""
    sizes = header.get("data")
    if sizes is None:
        return find_info(recipe.data, recipe.image_size, recipe.holdout)
    counts = (sizes["samples"], sizes["test_samples"], sizes["classes"])
    return Info(*counts, tuple(sizes["shape"]), recipe.holdout > 0)


def evaluate_run(
    run: SavedRun,
    device: torch.device,
    data_dir: str | Path | None = None,
    *,
    recalibrated: bool = False,
) -> Evaluation:
    """Evaluate a run's network on its test set; refuse data that have changed since the run.

    Images that cannot be read are left out, with a warning. With ``recalibrated`` the running
    statistics are first replaced by their averages over `recalibration_batches`, as at the end of
    the run itself.
    """
    recipe = run.recipe
    model = copy.deepcopy(run.model).to(device)
    arithmetic = autocast(recipe, device)
    data = load(recipe.data, data_dir, **recipe.data_options)
    check_data(run.header, fingerprint_of(data))
    feed = open_feed(
        data,
        on_bad_image="skip",
        skipped=SkippedImages(limit=1.0),
        batch=recipe.batch,
        seed=recipe.seed,
        augment=recipe.augment,
        device=device,
        dtype=parameter_dtype(recipe),
    )
    at_a_time = min(run.header.get("micro") or feed.test_batch, feed.test_batch)
    problem = f"an evaluation of {at_a_time} samples at a time does not fit into the memory"
    with closing(feed), explain_faults("device", problem, "use one with more memory"):
        if recalibrated:
            if recipe.ghost is not None:
                to_ghost(model, recipe.ghost)
            with arithmetic:
                batch = [slice(0, recipe.batch)]
                recalibrate(model, recalibration_batches(feed, run.plan, run.update, batch))
        return Evaluation(*evaluate(model, feed.test_batches(), arithmetic, Ranks(), at_a_time))
