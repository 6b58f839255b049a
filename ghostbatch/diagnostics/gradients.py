"""Per-sample gradients, plain or under dropout, dropconnect, label noise or loss weights."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from ghostbatch.diagnostics.covariance import IncrementCovariance
from ghostbatch.diagnostics.scan import evaluation_mode
from ghostbatch.errors import InputError, check_choice, check_positive
from ghostbatch.nn.dropconnect import LAYERS, connections
from ghostbatch.optim import random_labels

Loss = Callable[[Tensor, Tensor], Tensor]
Change = Literal["none", "dropout", "dropconnect", "labels", "weights"]

MAX_VALUES = 5000
"""Largest number of parameter values; their covariance is a square matrix of that size."""


def increment_covariance(
    model: nn.Module,
    inputs: Tensor,
    labels: Tensor,
    *,
    change: Change = "none",
    strength: float = 0.5,
    draws: int = 1,
    seed: int = 0,
    loss: Loss = F.cross_entropy,
    only: Sequence[str] | None = None,
    chunk: int = 256,
) -> IncrementCovariance:
    """Return the moments of per-sample gradients, which give the covariance of an increment.

    The model is put into evaluation mode meanwhile, so norm layers use their running statistics: a
    single sample has no batch statistics.

    Args:
        model: gradients are taken at its weights.
        inputs: the samples, (N, ...).
        labels: one per sample; integers for ``change="labels"``.
        change: "dropout" drops the inputs of linear and convolutional layers, "dropconnect" their
            weights, both with probability ``strength`` and rescaling the rest; "labels" replaces a
            label by a random class with that probability; "weights" multiplies losses by draws of
            N(1, strength), as the noise rule does. Draws are independent between samples.
        strength: see ``change``.
        draws: number of random changes per sample, over which the moments are averaged.
        seed: seeds the draws.
        loss: takes outputs and labels of a batch, and is called with batches of one.
        only: names of the parameters to use, all trainable ones if None; at most 5,000 values.
        chunk: samples per pass.

    >>> model = nn.Linear(2, 1, bias=False)
    >>> x, y = torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.zeros(2)
    >>> error = lambda out, y: out.sum() - y.sum()  # so that the gradient is the input
    >>> found = increment_covariance(model, x, y, loss=error)
    >>> found.mean.tolist(), found.second.tolist()
    ([0.5, 0.5], [[0.5, 0.0], [0.0, 0.5]])

    """
    check_choice("change", change, get_args(Change))
    check_positive(draws=draws, chunk=chunk)
    if len(inputs) != len(labels) or len(labels) < 2:
        raise InputError("labels", f"{len(labels)} for {len(inputs)} inputs", "give one for each")
    if not (0 <= strength < 1 or (strength >= 1 and change in ("none", "weights"))):
        remedy = "use a probability below 1, or with weights a variance"
        raise InputError("strength", f"{strength} is out of range", remedy)
    weights = _selected_weights(model, only)
    count = sum(w.numel() for w in weights.values())
    first = torch.zeros(count, dtype=torch.float64)
    second = torch.zeros(count, count, dtype=torch.float64)
    draws = draws if change != "none" else 1
    with (
        torch.random.fork_rng(devices=[inputs.device] if inputs.is_cuda else []),
        evaluation_mode(model),
        _dropped_inputs(model, strength if change == "dropout" else 0.0),
    ):
        torch.manual_seed(seed)
        for _ in range(draws):
            for x, y in zip(inputs.split(chunk), labels.split(chunk), strict=True):
                g = _gradients(model, weights, x, y, loss, change, strength)
                first += g.sum(0).cpu()
                second += (g.T @ g).cpu()
    total = draws * len(labels)
    return IncrementCovariance(first / total, second / total, len(labels))


def per_sample_gradients(
    model: nn.Module,
    inputs: Tensor,
    labels: Tensor,
    *,
    loss: Loss = F.cross_entropy,
    only: Sequence[str] | None = None,
) -> Tensor:
    """Return gradients (N, P) in fp64, one row per sample, in the order of the parameters."""
    with evaluation_mode(model):
        return _gradients(model, _selected_weights(model, only), inputs, labels, loss)


def _gradients(
    model: nn.Module,
    weights: dict[str, Tensor],
    x: Tensor,
    y: Tensor,
    loss: Loss,
    change: Change = "none",
    strength: float = 0.0,
) -> Tensor:
    """Return the gradients of one chunk, (samples, P), under a random change."""
    fixed = {n: p.detach() for n, p in model.named_parameters()}
    # In the order of the layers, so that the masks are reproducible.
    dropped = list(connections(model)) if change == "dropconnect" else []

    def sample_loss(weights: dict[str, Tensor], sample: Tensor, label: Tensor) -> Tensor:
        state = {**fixed, **weights}
        for name in dropped:
            state[name] = F.dropout(state[name], strength)
        return loss(functional_call(model, state, (sample.unsqueeze(0),)), label.unsqueeze(0))

    if change == "labels":
        with torch.no_grad():
            classes = model(x[:1]).shape[1]
        drawn = random_labels(len(y), classes, strength, device=y.device)
        y = torch.where(drawn < 0, y, drawn)
    by_name = vmap(grad(sample_loss), in_dims=(None, 0, 0), randomness="different")(weights, x, y)
    rows = torch.cat([by_name[name].flatten(1) for name in weights], dim=1).double()
    if change == "weights":
        rows *= 1 + strength**0.5 * torch.randn(len(rows), 1, device=rows.device)
    return rows


def _selected_weights(model: nn.Module, only: Sequence[str] | None) -> dict[str, Tensor]:
    """Return the named trainable parameters, or all of them, detached."""
    known = {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}
    for name in only or ():
        if name not in known:
            problem = f"{name!r} is not a trainable parameter"
            raise InputError("only", problem, f"use one like {next(iter(known))}")
    weights = known if only is None else {name: known[name] for name in only}
    if (count := sum(w.numel() for w in weights.values())) > MAX_VALUES:
        raise InputError("only", f"{count} values are above {MAX_VALUES}", "name fewer parameters")
    return weights


@contextmanager
def _dropped_inputs(model: nn.Module, probability: float) -> Iterator[None]:
    """Drop the inputs of linear and convolutional layers with this probability."""

    def drop(_layer: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return (F.dropout(inputs[0], probability), *inputs[1:])

    with ExitStack() as hooks:
        for layer in model.modules():
            if probability and isinstance(layer, LAYERS):
                hooks.enter_context(layer.register_forward_pre_hook(drop))
        yield
