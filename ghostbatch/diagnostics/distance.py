"""How far the weights have walked from where they started."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ghostbatch.diagnostics.sharded import local, same_place, spread_like, sum_shards
from ghostbatch.errors import InputError

Keep = Literal["exact", "cpu", "bf16"]

PIECE = 2**25
"""Values that are subtracted at a time: what a measurement needs of memory besides."""


@dataclass(frozen=True)
class Distance:
    """Euclidean distance from the initial weights; as a float it is the total."""

    total: float
    layers: dict[str, float]
    """By parameter name; the total is the root of the sum of their squares."""
    error: float = 0.0
    """What rounding the initial weights can have done to the total at most; 0 if they are exact."""

    def __float__(self) -> float:
        return self.total


class WeightDistance:
    """Remembers a model's trainable parameters and measures how far they have moved since.

    A measurement is one fused pass over the weights on their device and one number per tensor sent
    from there. With DDP it needs no communication. With FSDP2 build it after ``fully_shard``: then
    each rank remembers its own shards, and ``distance`` must be called on all ranks, since it adds
    up their squares in one collective.

    Args:
        model: its parameters are looked up once, now; DDP and compiled models are seen through.
        keep: how the initial weights are remembered. "exact": a copy beside the weights. "cpu": the
            same copy in the CPU's memory, which travels to the device for each measurement; the
            distances are the same to the last bit. "bf16": beside the weights in half the memory of
            fp32. There a rounding r is left, of norm at most 2^-8 of the weights', and known; its
            square is taken off, so that the distance starts at 0. A total that was d then comes out
            as sqrt(d^2 - 2 d.r): off by 2 |r| at the very most (`Distance.error`), and by about
            |r| / sqrt(n) for n weights that do not know of their rounding.
        norms: count the parameters of norm layers.
        biases: count the parameters that are called bias, those of norm layers too.

    >>> layer = nn.Linear(2, 1)
    >>> walked = WeightDistance(layer)
    >>> with torch.no_grad():
    ...     _ = layer.bias.add_(3.0)
    >>> round(walked.distance().total, 4), round(walked.distance().layers["bias"], 4)
    (3.0, 3.0)
    >>> WeightDistance(layer, biases=False).distance().layers
    {'weight': 0.0}

    """

    def __init__(
        self, model: nn.Module, *, keep: Keep = "exact", norms: bool = True, biases: bool = True
    ) -> None:
        if keep not in get_args(Keep):
            raise InputError(
                "keep", f"{keep!r} is unknown", f"choose one of {', '.join(get_args(Keep))}"
            )
        self._keep = keep
        self._parameters = dict(_counted(_inside(model), norms, biases))
        self._remember({name: p.detach() for name, p in self._parameters.items()})

    @torch.no_grad()
    def distance(self) -> Distance:
        """The distance now, per parameter tensor and in all."""
        squares = self._squares()
        left = {name: square - self._rounding.get(name, 0.0) for name, square in squares.items()}
        left = {name: 0.0 if square < 0 else square for name, square in left.items()}  # NaN stays
        layers = {name: sqrt(square) for name, square in left.items()}
        error = 2 * sqrt(sum(self._rounding.values()))
        return Distance(sqrt(sum(left.values())), layers, error)

    def state_dict(self) -> dict[str, Any]:
        """The initial weights, for a checkpoint; with FSDP2 they are DTensors."""
        state: dict[str, Any] = {"start": self._start}
        return {**state, "rounding": self._rounding} if self._rounding else state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Measure from the initial weights of an earlier session."""
        start: dict[str, Tensor] = state_dict["start"]
        if {n: t.shape for n, t in start.items()} != {n: t.shape for n, t in self._start.items()}:
            raise ValueError("the saved weights are those of another model")
        self._remember({n: same_place(t, self._parameters[n]) for n, t in start.items()})
        self._rounding |= state_dict.get("rounding", {})

    @torch.no_grad()
    def _remember(self, weights: dict[str, Tensor]) -> None:
        self._rounding: dict[str, float] = {}
        self._start = {n: self._copy(weights[n], self._parameters[n]) for n in self._parameters}
        if self._keep == "bf16":
            self._rounding = self._squares(weights)

    def _copy(self, weights: Tensor, parameter: Tensor) -> Tensor:
        if self._keep == "cpu":
            return spread_like(weights, local(weights).cpu().clone())
        dtype = torch.bfloat16 if self._keep == "bf16" else parameter.dtype
        return weights.to(parameter.device, dtype, copy=True)

    def _squares(self, weights: dict[str, Tensor] | None = None) -> dict[str, float]:
        """Squared distances of the parameters, or of other ``weights``, from the start."""
        if not self._parameters:
            return {}
        now = list(weights.values()) if weights is not None else list(self._parameters.values())
        norms: list[Tensor] = []
        for piece in _pieces(now):
            mine = [local(tensor) for tensor in now[piece]]
            start = [local(tensor) for tensor in list(self._start.values())[piece]]
            near = [s.to(m.device, m.dtype) for s, m in zip(start, mine, strict=True)]
            moved = torch._foreach_sub(mine, near)
            wide = [m.to(torch.promote_types(m.dtype, torch.float32)) for m in moved]
            norms += torch._foreach_norm(wide)
        squares = _side_by_side(norms).square()
        squares = sum_shards(squares, list(self._parameters.values()))
        return dict(zip(self._parameters, squares.tolist(), strict=True))


def log_spaced(last: int, per_decade: int = 20) -> list[int]:
    """Updates from 1 to ``last``, evenly spaced in log time as far as whole numbers allow.

    >>> log_spaced(10, per_decade=4)
    [1, 2, 3, 6, 10]
    """
    steps = range(10 * per_decade)
    spaced = {round(10 ** (step / per_decade)) for step in steps}
    return sorted({update for update in spaced if update < last} | {last})


def _inside(model: nn.Module) -> nn.Module:
    """The model that DDP or `torch.compile` has wrapped, so that names do not depend on them."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if isinstance(model, DistributedDataParallel):
            inner = model.module
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def _counted(model: nn.Module, norms: bool, biases: bool) -> Iterator[tuple[str, nn.Parameter]]:
    """Trainable parameters, each once; a norm layer is one with Norm in the name of its class."""
    in_norms = {
        id(parameter)
        for layer in model.modules()
        if any("Norm" in kind.__name__ for kind in type(layer).__mro__)
        for parameter in layer.parameters(recurse=False)
    }
    for name, parameter in model.named_parameters():
        is_bias = name.rpartition(".")[2] == "bias"
        left_out = (is_bias and not biases) or (id(parameter) in in_norms and not norms)
        if parameter.requires_grad and not left_out:
            yield name, parameter


def _pieces(tensors: Sequence[Tensor]) -> Iterator[slice]:
    """Consecutive tensors of about `PIECE` values together."""
    first, values = 0, 0
    for number, tensor in enumerate(tensors):
        values += tensor.numel()
        if values >= PIECE or number == len(tensors) - 1:
            yield slice(first, number + 1)
            first, values = number + 1, 0


def _side_by_side(norms: list[Tensor]) -> Tensor:
    """One vector in fp64; a single kernel where they are of one kind."""
    if len({(norm.device, norm.dtype) for norm in norms}) == 1:
        return torch.stack(norms).double()
    return torch.stack([norm.to(norms[0].device, torch.float64) for norm in norms])
