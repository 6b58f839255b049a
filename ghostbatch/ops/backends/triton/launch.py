"""Launches the kernels of ghost norm.

Importing this module imports Triton; `paths` does so when the first CUDA tensor arrives.
"""

import math
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any

import torch
import triton
from torch import Tensor

from ghostbatch.ops import kernels
from ghostbatch.ops.buffers import Buffers
from ghostbatch.ops.counters import counters
from ghostbatch.ops.layouts import as_dense_as, in_rows, workable
from ghostbatch.ops.running_kernel import running_kernel
from ghostbatch.ops.tiling import Plan, Tuning, plan, tuning


def plan_for(x: Tensor, ghost: int, settings: Tuning | None, backward: bool) -> Plan:
    """The plan for a batch that is dense, in rows or in planes."""
    planes = not in_rows(x)
    shape = tuple(x.shape)
    chosen = settings or tuning(shape, x.dtype, planes, backward, ghost)
    return plan(shape, x.dtype, planes, ghost, chosen, _multiprocessors(x.device))


def fits(x: Tensor, ghost: int) -> bool:
    """Whether the offsets within a tile, and the tables over ghosts, fit in 32 bits."""
    cut = plan_for(x, ghost, None, backward=False)
    return max(cut.reach, cut.last_rows, 4 * cut.ghosts * x.shape[1]) < 2**31


@lru_cache
def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    ghost: int,
    eps: float,
    activation: str | None = None,
    residual: Tensor | None = None,
    moving: Buffers | None = None,
    settings: Tuning | None = None,
) -> tuple[Tensor, Tensor]:
    """As `plain.forward`, in one kernel, which moves running statistics too if it can."""
    y = torch.empty_like(x)
    dense, out = workable(x, y)
    residual = None if residual is None else as_dense_as(dense, residual)
    cut = plan_for(dense, ghost, settings, backward=False)
    table = x.new_empty(3, cut.ghosts, x.shape[1], dtype=torch.float32)
    parts, counters = _scratch(x, cut)
    moving = moving if moving is not None and moving.suit(torch.float32) else None
    _launch(
        kernels.forward_kernel,
        cut,
        *(dense, _or(residual, dense), out, _or(weight, dense), _or(bias, dense)),
        *(table, parts, counters),
        *((table,) * 3 if moving is None else _places(moving)),
        *((0, 0.0, 0.0, 0.0) if moving is None else _schedule(moving, cut.ghosts)),
        eps,
        WEIGHT=weight is not None,
        BIAS=bias is not None,
        MOVING=moving is not None,
        TRACKED=moving is not None and moving.tracked is not None,
        RESIDUAL=residual is not None,
        RELU=activation == "relu",
    )
    if out is not y:
        y.copy_(out)
    if moving is not None:
        moving.have_moved()
    return y, table


def backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    statistics: Tensor,
    ghost: int,
    activation: str | None = None,
    bias: Tensor | None = None,
    y: Tensor | None = None,
    settings: Tuning | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `plain.backward`, in one kernel."""
    dx = torch.empty_like(x)
    dense, out = workable(x, dx)
    dy = as_dense_as(dense, dy)
    y = None if y is None else as_dense_as(dense, y)
    cut = plan_for(dense, ghost, settings, backward=True)
    sums = torch.empty_like(statistics[:2])
    parameters = statistics.new_empty(2, x.shape[1])
    parts, counters = _scratch(x, cut)
    dresidual = x.new_empty(0) if y is None else torch.empty_like(out)
    _launch(
        kernels.backward_kernel,
        cut,
        *(dy, dense, _or(y, dense), out, dresidual, _or(weight, dense), _or(bias, dense)),
        *(statistics, sums, parameters, parts, counters),
        WEIGHT=weight is not None,
        BIAS=bias is not None,
        RESIDUAL=y is not None,
        RELU=activation == "relu",
    )
    if out is not dx:
        dx.copy_(out)
        dresidual = dresidual if y is None else torch.empty_like(x).copy_(dresidual)
    return dx, parameters, dresidual


def move_running(buffers: Buffers, moments: Tensor) -> None:
    """Move the running statistics by the ghosts' (2, K, C), oldest first, in one kernel."""
    _, ghosts, channels = moments.shape
    block = min(triton.next_power_of_2(channels), 32)
    with _on(moments.device):
        running_kernel[(triton.cdiv(channels, block),)](
            *_places(buffers),
            *(moments, moments.stride(0), ghosts, channels),
            *_schedule(buffers, ghosts),
            TRACKED=buffers.tracked is not None,
            R=min(triton.next_power_of_2(ghosts), 64),
            BC=block,
        )
    buffers.have_moved()


def _places(buffers: Buffers) -> tuple[Tensor, Tensor, Tensor]:
    return buffers.mean, buffers.var, _or(buffers.tracked, buffers.mean)


def _schedule(buffers: Buffers, ghosts: int) -> tuple[int, float, float, float]:
    """By how much the count of batches grows; the share of what was; a ghost's weight, its decay.

    K updates in a row are one: see `running`.
    """
    momentum = buffers.momentum or 0.0
    decay = 1 - momentum
    if buffers.running == "mean":
        return 1, decay, momentum / ghosts, 0.0
    return ghosts, decay**ghosts, momentum, math.log2(decay) if decay > 0 else -1e30


def _or(tensor: Tensor | None, other: Tensor) -> Tensor:
    """A kernel takes some tensor in the place of one that is not there, and never reads it."""
    return other if tensor is None else tensor.contiguous() if tensor.dim() == 1 else tensor


def _scratch(x: Tensor, cut: Plan) -> tuple[Tensor, Tensor]:
    """Room for the sums of tiles, and counters, which were zero before their first use."""
    groups = cut.ghosts * cut.blocks
    rows = groups * (max(cut.tiles, cut.last_tiles) + cut.bundles)
    parts = x.new_empty(rows * 2 * int(cut.constants["BC"]), dtype=torch.float32)
    return parts, counters(x.device, 1 + groups * (1 + cut.bundles) + cut.blocks)


def _launch(kernel: Any, cut: Plan, *tensors: Any, **constants: bool) -> None:
    with _on(tensors[0].device):
        kernel[(cut.grid,)](*tensors, *cut[:9], **constants, **cut.constants)


def _on(device: torch.device) -> AbstractContextManager[object]:
    """Triton launches on the current device, so make it this one."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
