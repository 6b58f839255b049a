"""What a run measures at its evaluations, on request: gradient noise scale and sharpness.

Measuring changes no number of the run: weights, buffers, gradients and draws stay as they are.
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import groupby, islice
from math import nan
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from ghostbatch.data import BatchSplit, Data
from ghostbatch.data.datasets import ImageData
from ghostbatch.data.feed import Normalise
from ghostbatch.diagnostics import BatchedLoss, GradientNoiseScale, largest_eigenvalue
from ghostbatch.diagnostics.scan import unchanged, untracked
from ghostbatch.draws import generator, key
from ghostbatch.errors import InputError
from ghostbatch.ops import LOCAL
from ghostbatch.ops.loss import summed_cross_entropy
from ghostbatch.recipe import Recipe
from ghostbatch.train.state import State, parameter_dtype, plain_model
from ghostbatch.train.update import Update

Measure = Callable[[], dict[str, float]]
"""Measures the weights of a run; returns fields of a `Record`."""

SHARE = 1000
"""An estimate of the noise scale takes one image for so many images of the run."""

FEWEST, MOST = 8, 64
"""Parts that it takes at the least and at the most."""

PART = 128
"""Images of a part of a network without batch norm."""

GROUPS = 8
"""About how many groups the parts form; their spread gives the interval of the noise scale."""

IMAGES = 1000
"""Training images of the loss whose sharpness is measured."""

TOLERANCE = 0.01
"""Relative error of the sharpness of a run."""


def check_measures(
    noise_scale: bool, sharpness: bool, recipe: Recipe, data: Data, split: BatchSplit
) -> None:
    """Refuse a measurement that a run cannot make."""
    if noise_scale and split.needs_full_batch and split.world > 1:
        problem = "plain batch norm over several ranks has no parts to compare"
        raise InputError("noise_scale", problem, "set ghost, use one rank, or leave it out")
    if sharpness and not isinstance(data, ImageData):
        problem = f"the images of {recipe.data} are not kept in memory"
        raise InputError("sharpness", problem, "use another data set, or leave it out")


def make_measures(noise_scale: bool, sharpness: bool, update: Update, data: Data) -> list[Measure]:
    """Return the wanted measurements of a run; every rank must call all that it got."""
    found: list[Measure] = []
    if noise_scale:
        found.append(partial(measure_noise_scale, update))
    if sharpness and update.ranks.rank == 0 and isinstance(data, ImageData):
        found.append(Sharpness(update.state, data))
    return found


def measure_noise_scale(update: Update) -> dict[str, float]:
    """Return the gradient noise scale at the weights of a run, and its 95 % interval.

    The gradients are those of samples that the run sees next, with augmentation and dropout, but
    without label noise, dropconnect and random weights of losses. Each rank measures some groups of
    parts by itself, so the number of ranks does not change the result.
    """
    state, ranks = update.state, update.ranks
    groups = part_groups(state)
    mine = range(ranks.rank, len(groups), ranks.world)
    sums = torch.zeros(len(groups), 3, dtype=torch.float64, device=state.device)
    scale = GradientNoiseScale(state.model, process_group=LOCAL)
    with unchanged(state.model), untracked(state.model):
        gradients = part_gradients(update, [part for n in mine for part in groups[n]])
        for n in mine:
            scale.reset()
            scale.update([next(gradients) for _ in groups[n]], groups[n][0].size)
            sums[n] = torch.tensor(scale.state_dict()["sums"][0])
    every = ranks.sum(sums).tolist()
    scale.load_state_dict({"sums": every, "length": 1, "done": len(every)})
    found = scale.estimate()
    low, high = found.interval
    return {"noise_scale": found.value, "noise_scale_low": low, "noise_scale_high": high}


class Part(NamedTuple):
    """Samples of the stream that are normalised by themselves."""

    batch: int
    """Which batch of the stream holds them."""
    start: int
    """Position of the first of them in that batch."""
    size: int


def part_groups(state: State) -> list[list[Part]]:
    """Return the parts from the coming update on, in equal groups.

    A part is a ghost, or a batch of plain batch norm. The remainder of a batch that is not a
    multiple of the ghost size is left out.
    """
    recipe, first = state.plan.recipe, state.plan.stream(state.update).start
    size = recipe.ghost or recipe.batch
    if not any(isinstance(layer, _BatchNorm) for layer in state.model.modules()):
        size = PART
    size = min(size, recipe.batch)
    images = state.plan.images(state.plan.updates) // SHARE
    count, of_batch = min(max(images // size, FEWEST), MOST), recipe.batch // size
    together = max(2, count // GROUPS)
    parts = (Part(first + n // of_batch, n % of_batch * size, size) for n in range(count))
    return [list(islice(parts, together)) for _ in range(count // together)]


def part_gradients(update: Update, parts: list[Part]) -> Iterator[list[Tensor]]:
    """Yield the gradient of the mean loss over each part."""
    state, recipe = update.state, update.recipe
    weights = [p for p in state.model.parameters() if p.requires_grad]
    for batch, group in groupby(parts, key=lambda part: part.batch):
        positions = [slice(part.start, part.start + part.size) for part in group]
        for micro in update.feed.micro_batches(batch, positions):
            first = micro.positions.start
            if state.position is not None:
                state.position.set(key(recipe.seed, "dropout", state.update), first)
            update.seed_draws(first)
            with update.autocast:
                outputs = state.model(micro.images)
                smoothing = recipe.label_smoothing
                loss, _ = summed_cross_entropy(outputs, micro.labels, None, smoothing)
            loss = loss / len(micro.labels)
            found = torch.autograd.grad(loss, weights, allow_unused=True, materialize_grads=True)
            yield list(found)


class Sharpness:
    """Measures the largest eigenvalue of the Hessian of the training loss, as `study sharpness`.

    It is that of a copy of the network with plain batch norm, in fp32 or fp64.
    """

    def __init__(self, state: State, data: ImageData) -> None:
        dtype = parameter_dtype(state.plan.recipe)
        self.state = state
        self.model = plain_model(state.plan.recipe, data.info).to(state.device, dtype)
        self.loss = training_loss(data, state.device, dtype)

    def __call__(self) -> dict[str, float]:
        """Return the sharpness; NaN if the second derivatives are not finite."""
        self.model.load_state_dict(self.state.model.state_dict())
        try:
            found = float(largest_eigenvalue(self.model, self.loss, tolerance=TOLERANCE))
        except InputError:
            found = nan
        return {"sharpness": found}


def training_loss(data: ImageData, device: torch.device, dtype: torch.dtype) -> BatchedLoss:
    """Return the mean loss over the same thousand training images, in one batch, not augmented."""
    images = torch.randperm(len(data.train), generator=generator(0, "potential"))[:IMAGES]
    return BatchedLoss(
        data.train.images[images].to(device),
        data.train.labels[images].to(device),
        batch=IMAGES,
        prepare=Normalise(data.mean, data.deviation, device, dtype),
    )
