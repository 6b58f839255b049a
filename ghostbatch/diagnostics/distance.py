"""The distance of a model's weights from their initial values, also of weights sharded by FSDP2."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ghostbatch.errors import InputError, check_choice, check_is
from ghostbatch.optim.groups import is_bias, norm_parameters, wide_dtype

Keep = Literal["exact", "cpu", "bf16"]

CHUNK = 2**25
"""Number of values subtracted at a time, which bounds the memory of a measurement."""


@dataclass(frozen=True)
class Distance:
    """Euclidean distance from the initial weights; ``float(distance)`` is the total."""

    total: float
    layers: dict[str, float]
    """Distance of each parameter tensor, by name; the total is the root of the sum of squares."""
    error: float = 0.0
    """Bound on the error of the total from rounding the initial weights; 0 if they are exact."""

    def __float__(self) -> float:
        return self.total


class WeightDistance:
    """Keeps a copy of a model's trainable parameters and measures how far they have moved since.

    A measurement is one fused pass over the weights on their device, from which one number per
    tensor is copied to the CPU. With DDP it needs no communication. With FSDP2 build it after
    ``fully_shard`` and call ``distance`` on all ranks: each keeps its own shards, and one
    collective adds them up.

    Args:
        model: its parameters are looked up once, now. Names are those of the model inside DDP or
            ``torch.compile``.
        keep: how the initial weights are kept. "exact": a copy on the device of the weights. "cpu":
            the same copy in CPU memory, copied to the device for each measurement; the distances
            are bit for bit the same. "bf16": a copy on the device, in half the memory of fp32. The
            square of its rounding r is subtracted, so that the distance starts at 0. A step d is
            then measured as sqrt(|d|^2 - 2 d.r): off by at most 2 |r| (`Distance.error`), and
            typically by |r| / sqrt(n) for n weights; |r| is at most 2^-8 of the weights' norm.
        norms: include the parameters of norm layers.
        biases: include the parameters called bias, also those of norm layers.

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
        check_is("model", model, nn.Module, "a torch.nn.Module")
        check_choice("keep", keep, get_args(Keep))
        self._keep = keep
        model = _unwrapped(model)
        in_norms = norm_parameters(model)
        self._parameters = {
            name: parameter
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
            and (norms or id(parameter) not in in_norms)
            and (biases or not is_bias(name))
        }
        self._keep_start({name: p.detach() for name, p in self._parameters.items()})

    @torch.no_grad()
    def distance(self) -> Distance:
        """Return the distance now, per parameter tensor and in total."""
        rounding, squares = self._rounding, self._squares(self._parameters)
        # max returns its first argument if that is NaN.
        squares = {n: max(s - rounding.get(n, 0.0), 0.0) for n, s in squares.items()}
        layers = {name: sqrt(square) for name, square in squares.items()}
        error = 2 * sqrt(sum(rounding.values()))
        return Distance(sqrt(sum(squares.values())), layers, error)

    def state_dict(self) -> dict[str, Any]:
        """Return the initial weights for a checkpoint; with FSDP2 they are DTensors."""
        state: dict[str, Any] = {"start": self._start}
        return {**state, "rounding": self._rounding} if self._rounding else state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Measure from the initial weights in a checkpoint."""
        start: dict[str, Tensor] = state_dict.get("start", {})
        if {n: t.shape for n, t in start.items()} != {n: t.shape for n, t in self._start.items()}:
            problem = "its initial weights are those of another model"
            raise InputError("state_dict", problem, "load that of this model")
        self._keep_start({n: redistribute(t, self._parameters[n]) for n, t in start.items()})
        self._rounding |= state_dict.get("rounding", {})

    @torch.no_grad()
    def _keep_start(self, weights: dict[str, Tensor]) -> None:
        """Copy ``weights`` as the initial ones; in bf16 also note their squared rounding."""
        self._start = {n: self._copy(weights[n], self._parameters[n]) for n in self._parameters}
        self._rounding = self._squares(weights) if self._keep == "bf16" else {}

    def _copy(self, weights: Tensor, parameter: Tensor) -> Tensor:
        if self._keep == "cpu":
            return weights.to("cpu", copy=True)
        dtype = torch.bfloat16 if self._keep == "bf16" else parameter.dtype
        return weights.to(parameter.device, dtype, copy=True)

    def _squares(self, weights: Mapping[str, Tensor]) -> dict[str, float]:
        """Return the squared distance of each of ``weights`` from its initial value."""
        if not self._parameters:
            return {}
        names, parameters = list(self._parameters), list(self._parameters.values())
        norms: list[Tensor] = []
        for chunk in _chunks(parameters):
            local = [to_local(weights[n]) for n in names[chunk]]
            start = [to_local(self._start[n]) for n in names[chunk]]
            start = [s.to(w.device, w.dtype) for s, w in zip(start, local, strict=True)]
            moved = torch._foreach_sub(local, start)
            wide = [m.to(wide_dtype(m)) for m in moved]
            norms += torch._foreach_norm(wide)
        norms = [norm.to(norms[0].device) for norm in norms]
        squares = torch.stack(norms).double().square()
        return dict(zip(names, sum_shards(squares, parameters).tolist(), strict=True))


def log_spaced(last: int, per_decade: int = 20) -> list[int]:
    """Return updates from 1 to ``last``, evenly spaced in log time up to rounding.

    >>> log_spaced(10, per_decade=4)
    [1, 2, 3, 6, 10]
    """
    spaced = {round(10 ** (step / per_decade)) for step in range(10 * per_decade)}
    return sorted({update for update in spaced if update < last} | {last})


def _unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside DDP or `torch.compile`, so that names do not depend on them."""
    while isinstance(model, DistributedDataParallel) or hasattr(model, "_orig_mod"):
        inner = "module" if isinstance(model, DistributedDataParallel) else "_orig_mod"
        model = model.get_submodule(inner)
    return model


def _chunks(tensors: Sequence[Tensor]) -> Iterator[slice]:
    """Yield slices of consecutive tensors with about `CHUNK` values each."""
    first, values = 0, 0
    for number, tensor in enumerate(tensors):
        values += tensor.numel()
        if values >= CHUNK or number == len(tensors) - 1:
            yield slice(first, number + 1)
            first, values = number + 1, 0


def as_dtensor(tensor: Tensor) -> Any:
    """Return the tensor if it is a DTensor, else None, without importing DTensor's slow module."""
    module = sys.modules.get("torch.distributed.tensor")
    return tensor if module is not None and isinstance(tensor, module.DTensor) else None


def to_local(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a DTensor, or an ordinary tensor itself."""
    sharded = as_dtensor(tensor)
    return tensor if sharded is None else sharded.to_local()


def redistribute(tensor: Tensor, like: Tensor) -> Tensor:
    """Return ``tensor`` sharded (or not) as ``like`` is; call it on all ranks."""
    sharded, wanted = as_dtensor(tensor), as_dtensor(like)
    if sharded is not None:
        sharded = sharded.to(sharded.device_mesh.device_type)  # where its collectives run
    if wanted is None:
        return tensor if sharded is None else sharded.full_tensor()
    layout = wanted.device_mesh, wanted.placements
    if sharded is None:
        distribute = sys.modules["torch.distributed.tensor"].distribute_tensor
        sharded = distribute(tensor.to(to_local(like).device), *layout)
    return sharded.redistribute(*layout)  # type: ignore[no-any-return]


def sum_shards(squares: Tensor, tensors: Sequence[Tensor]) -> Tensor:
    """Add up ``squares``, one value per tensor computed from this rank's shard, over all ranks.

    It takes one collective for each dimension of the device mesh along which a tensor is sharded:
    one for FSDP2, also if it replicates over nodes, and none for ordinary tensors.
    """
    sharded = [as_dtensor(tensor) for tensor in tensors]
    meshes = {each.device_mesh for each in sharded if each is not None}
    if not meshes:
        return squares
    if len(meshes) > 1:
        raise InputError("model", "its parameters are on several device meshes", "use a single one")
    mesh = meshes.pop()
    for dim in range(mesh.ndim):
        shards = [each is not None and each.placements[dim].is_shard() for each in sharded]
        if any(shards):
            # A tensor that is replicated along this dimension must count once, not once per rank.
            scale = [1.0 if shard else 1 / mesh.size(dim) for shard in shards]
            squares = squares * squares.new_tensor(scale)
            dist.all_reduce(squares, group=mesh.get_group(dim))
    return squares
