"""Gradients of single samples, as they are and as dropout and its kin make them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from ghostbatch.diagnostics.covariance import IncrementCovariance
from ghostbatch.errors import InputError

Change = Literal["none", "dropout", "dropconnect", "labels", "weights"]

LARGEST = 5000
"""Parameters whose covariance, a square matrix of so many rows, still fits comfortably."""

LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def increment_covariance(
    model: nn.Module,
    inputs: Tensor,
    labels: Tensor,
    *,
    loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy,
    only: Sequence[str] | None = None,
    change: Change = "none",
    strength: float = 0.5,
    draws: int = 1,
    seed: int = 0,
    chunk: int = 256,
) -> IncrementCovariance:
    """Moments of the gradients of single samples, from which the covariance of a step follows.

    The model is taken in evaluation mode: norm layers use their running statistics, since a sample
    by itself has no batch. It is left as it was.

    Args:
        model: at whose weights the gradients are taken.
        inputs: the samples, (N, ...).
        labels: as many; whole numbers for ``change="labels"``.
        loss: of outputs and labels; the mean over a batch of one is that sample's loss.
        only: names of the parameters that count; all trainable ones if None. There may be 5,000
            values, since the covariance has the square of that.
        change: "dropout" drops the inputs of linear and convolutional layers, "dropconnect" their
            weights, both with probability ``strength`` and rescaling the rest; "labels" puts a
            class drawn at random in the place of a label with that probability; "weights" weighs
            losses by N(1, strength), which is the noise rule. Draws are independent between
            samples.
        strength: see above.
        draws: of such changes per sample, which are averaged over.
        seed: of the draws.
        chunk: samples at a time.

    >>> model = nn.Linear(2, 1, bias=False)
    >>> x, y = torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.zeros(2)
    >>> error = lambda out, y: out.sum() - y.sum()  # so that the gradient is the input
    >>> found = increment_covariance(model, x, y, loss=error)
    >>> found.mean.tolist(), found.second.tolist()
    ([0.5, 0.5], [[0.5, 0.0], [0.0, 0.5]])

    """
    if change not in get_args(Change):
        known = ", ".join(get_args(Change))
        raise InputError("change", f"{change!r} is unknown", f"choose one of {known}")
    if len(inputs) != len(labels) or len(labels) < 2:
        raise InputError("labels", f"{len(labels)} for {len(inputs)} inputs", "give one for each")
    if not 0 <= strength < 1 and change in ("dropout", "dropconnect", "labels"):
        raise InputError("strength", f"{strength} is no probability below 1", "use 0.5")
    weights = _counted(model, only)
    count = sum(w.numel() for w in weights.values())
    first = torch.zeros(count, dtype=torch.float64)
    second = torch.zeros(count, count, dtype=torch.float64)
    draws = draws if change != "none" else 1
    device = inputs.device
    with (
        torch.random.fork_rng(devices=[device] if device.type == "cuda" else []),
        _dropping(model, strength if change == "dropout" else 0.0),
    ):
        torch.manual_seed(seed)
        for _ in range(draws):
            for x, y in zip(inputs.split(chunk), labels.split(chunk), strict=True):
                g = _gradients(model, weights, x, y, loss, change, strength)
                first += g.sum(0).cpu()
                second += (g.T @ g).cpu()
    total = len(labels) * draws
    return IncrementCovariance(first / total, second / total, len(labels))


def per_sample_gradients(
    model: nn.Module,
    inputs: Tensor,
    labels: Tensor,
    *,
    loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy,
    only: Sequence[str] | None = None,
) -> Tensor:
    """Gradients (N, P) in fp64, one row a sample, in the order of the model's parameters."""
    with _dropping(model, 0.0):
        return _gradients(model, _counted(model, only), inputs, labels, loss, "none", 0.0)


def _gradients(
    model: nn.Module,
    weights: dict[str, Tensor],
    x: Tensor,
    y: Tensor,
    loss: Callable[[Tensor, Tensor], Tensor],
    change: Change,
    strength: float,
) -> Tensor:
    fixed = {
        **{n: p.detach() for n, p in model.named_parameters() if n not in weights},
        **dict(model.named_buffers()),
    }
    dropped = _connections(model) if change == "dropconnect" else set()

    def sample_loss(moved: dict[str, Tensor], one: Tensor, label: Tensor) -> Tensor:
        both = {**fixed, **moved}
        for name in dropped:
            both[name] = F.dropout(both[name], strength)
        return loss(functional_call(model, both, (one.unsqueeze(0),)), label.unsqueeze(0))

    if change == "labels":
        y = _mislabelled(model, x, y, strength)
    each = vmap(grad(sample_loss), in_dims=(None, 0, 0), randomness="different")(weights, x, y)
    rows = torch.cat([each[name].flatten(1) for name in weights], dim=1).double()
    if change == "weights":
        rows *= 1 + strength**0.5 * torch.randn(len(rows), 1, device=rows.device)
    return rows


def _counted(model: nn.Module, only: Sequence[str] | None) -> dict[str, Tensor]:
    known = {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}
    for name in only or ():
        if name not in known:
            raise InputError(
                "only", f"{name!r} is no trainable parameter", f"for example {next(iter(known))}"
            )
    weights = known if only is None else {name: known[name] for name in only}
    if (count := sum(w.numel() for w in weights.values())) > LARGEST:
        raise InputError(
            "only", f"{count} values are too many for a matrix of them", "name a layer or two"
        )
    return weights


def _connections(model: nn.Module) -> set[str]:
    return {
        f"{name}.weight" if name else "weight"
        for name, layer in model.named_modules()
        if isinstance(layer, LAYERS)
    }


def _mislabelled(model: nn.Module, x: Tensor, y: Tensor, strength: float) -> Tensor:
    with torch.no_grad():
        classes = model(x[:1]).shape[1]
    wrong = torch.rand(len(y), device=y.device) < strength
    return torch.where(wrong, torch.randint(classes, (len(y),), device=y.device), y)


@contextmanager
def _dropping(model: nn.Module, p: float) -> Iterator[None]:
    """Evaluation mode, with the inputs of layers dropped with probability p."""
    modes = {module: module.training for module in model.modules()}

    def drop(_layer: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return (F.dropout(inputs[0], p), *inputs[1:])

    layers = [m for m in modes if isinstance(m, LAYERS)] if p else []
    hooks = [layer.register_forward_pre_hook(drop) for layer in layers]
    model.eval()
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for module, mode in modes.items():
            module.training = mode
