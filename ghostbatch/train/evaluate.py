"""Loss and accuracy on the test set, and the check that a network has an output for every class."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ghostbatch.data import BatchSplit, Feed
from ghostbatch.errors import InputError, one_line
from ghostbatch.nn import convertible, recalibrate
from ghostbatch.nn.cross_rank import CrossRankBatchNorm
from ghostbatch.nn.keep import kept_buffers
from ghostbatch.recipe import Plan
from ghostbatch.train.device import PROCESS
from ghostbatch.train.explain import lacks_memory
from ghostbatch.train.ranks import Ranks
from ghostbatch.train.state import State, autocast, parameter_dtype


@torch.no_grad()
def evaluate(
    model: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor]],
    autocast: torch.autocast,
    ranks: Ranks,
    at_a_time: int | None = None,
) -> tuple[float, float]:
    """Return mean loss and accuracy in percent over all ranks' batches; keep the model's mode.

    The network sees ``at_a_time`` samples of a batch; losses are summed over a batch, so that
    the sums do not depend on it.
    """
    training = model.training
    model.eval()
    device = next(model.parameters()).device
    sums = torch.zeros(3, dtype=torch.float64, device=device)  # of losses, correct answers, samples
    for images, labels in batches:
        with autocast:
            parts = images.split(at_a_time or max(1, len(images)))
            outputs = torch.cat([model(part) for part in parts])
        losses = F.cross_entropy(outputs.double(), labels, reduction="none")
        correct = outputs.argmax(1) == labels
        sums += torch.stack([losses, correct, torch.ones_like(losses)]).sum(1)
    model.train(training)
    loss, correct, samples = ranks.sum(sums).tolist()
    return loss / samples, 100 * correct / samples


RECALIBRATION_IMAGES = 50_000
"""Largest number of training images for the averages of `recalibration_batches`."""


def recalibration_batches(
    feed: Feed, plan: Plan, done: int, positions: Sequence[slice]
) -> Iterator[Tensor]:
    """Yield ``positions`` of the first batches that a run has seen in ``done`` updates.

    `recalibrate` averages over them. They are in the run's order and with its augmentation: at most
    one pass over the training set and `RECALIBRATION_IMAGES` images, but at least one batch.
    """
    batches = min(plan.samples, RECALIBRATION_IMAGES) // plan.recipe.batch
    for batch in range(max(1, min(batches, plan.stream(done).start))):
        for micro in feed.micro_batches(batch, positions):
            yield micro.images


def can_recalibrate(model: nn.Module) -> bool:
    """Return whether the model has running statistics, all of them in norm layers of known kinds.

    A subclass of BatchNorm that we do not know may need a momentum, which `recalibrate` removes.
    """
    norms, known = norms_with_statistics(model), set(convertible(model))
    return bool(norms) and all(n in known or isinstance(n, CrossRankBatchNorm) for n in norms)


def norms_with_statistics(model: nn.Module) -> list[_BatchNorm]:
    """Return the batch norms that have running statistics."""
    norms = (m for m in model.modules() if isinstance(m, _BatchNorm))
    return [norm for norm in norms if norm.running_mean is not None]


@contextmanager
def population_statistics(
    model: nn.Module, batches: Iterable[Tensor], arithmetic: torch.autocast
) -> Iterator[None]:
    """Use running statistics averaged over ``batches``; put back the model's own at the end."""
    with kept_buffers(model):
        # PROCESS: recalibrate keeps the state of PyTorch's default generators, and puts it back.
        with arithmetic, PROCESS:
            recalibrate(model, batches)
        yield


@contextmanager
def _counted_norms(model: nn.Module) -> Iterator[Counter[str]]:
    """Yield how often each norm runs, by its name, if the order of its ghosts matters."""
    calls: Counter[str] = Counter()
    norms = {norm for norm in norms_with_statistics(model) if norm.momentum is not None}
    hooks = [
        norm.register_forward_hook(lambda *_, name=name: calls.update([name]))
        for name, norm in model.named_modules()
        if norm in norms
    ]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def check_outputs(state: State, split: BatchSplit) -> None:
    """Refuse a network that fails on two empty images, or has no score for each class of them.

    Also refuse micro-batches where a norm runs several times in a forward: its running statistics
    depend on the order of the ghosts, which would be another one.
    """
    model, recipe, info = state.model, state.plan.recipe, state.info
    training = model.training
    model.eval()
    try:
        with _counted_norms(model) as calls:
            outputs = _run_two_images(state)
    except Exception as error:
        if isinstance(error, InputError) or lacks_memory(error):
            raise
        size = " x ".join(map(str, info.shape))
        reason = one_line(f"{type(error).__name__}: {error}")
        problem = f"{recipe.model} fails on images of {size} ({reason})"
        raise InputError("model", problem, "use a network for images of this size") from error
    model.train(training)
    for name, count in calls.items() if split.micro != split.batch else ():
        if count > 1:
            problem = f"{name} of {recipe.model} normalises {count} times in a forward"
            remedy = "leave micro out, which would change its running statistics"
            raise InputError("micro", problem, remedy)
    found = f"a {type(outputs).__name__}"
    if isinstance(outputs, Tensor):
        if outputs.ndim == 2 and outputs.shape[0] == 2 and outputs.shape[1] >= info.classes:
            return
        found = f"outputs of shape {tuple(outputs.shape)} for two images"
    problem = f"{recipe.model} returns {found}, but {recipe.data} has {info.classes} classes"
    raise InputError("model", problem, "let it return one score per class for each image")


def _run_two_images(state: State) -> Any:
    """Return what the network returns for two empty images."""
    recipe = state.plan.recipe
    shape, dtype = (2, *state.info.shape), parameter_dtype(recipe)
    with autocast(recipe, state.device):
        return state.model(torch.zeros(shape, device=state.device, dtype=dtype))


def leaves_out_parameters(state: State) -> bool:
    """Return whether the loss does not depend on some of the trainable parameters."""
    model = state.model
    training = model.training
    model.eval()
    _run_two_images(state).sum().backward()
    model.train(training)
    unused = any(p.requires_grad and p.grad is None for p in model.parameters())
    model.zero_grad()
    return unused
