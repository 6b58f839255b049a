"""Launches the kernels of ghost norm: how a batch is cut into tiles, and with which settings.

Importing this module imports Triton; `paths` does so when the first CUDA tensor arrives.
"""

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from ghostbatch.ops import kernels
from ghostbatch.ops.layouts import as_dense_as, in_rows, workable
from ghostbatch.ops.reference import ghost_sizes
from ghostbatch.ops.running_kernel import running_kernel

VECTOR_BYTES = 16
"""What a thread loads at once."""

LANES = 32
"""Threads of a warp."""


@dataclass(frozen=True)
class Tuning:
    """What changes the speed of a kernel and nothing else, but for the rounding of sums."""

    warps: int = 4
    vectors: int = 4
    """Vectors of 16 bytes that a thread loads before it uses the first."""
    subtiles: int = 4
    """Rounds of such loads in a ticket."""
    channels: int = 64
    """Channels that are normalised together, at most."""
    programs: int = 8
    """Programs on each multiprocessor, which draw tickets until none is left; 0: one a ticket."""
    lookahead: int = 256
    """Tickets between statistics and normalisation, beyond one group."""
    registers: int | None = None
    """Of a thread, at most."""
    fan: int = 64
    """Sums of tiles that one program adds up at once."""
    stream: int = 1
    """What the cache is told: 0 nothing, 1 what is not soon read again, 2 also what is."""


class Plan(NamedTuple):
    """A batch cut into tiles; `kernels` explains the words."""

    ghosts: int
    aligned: int
    """Channels, in units of what divides them."""
    ghost_rows: int
    last_rows: int
    tiles: int
    last_tiles: int
    blocks: int
    delay: int
    grid: int
    reach: int
    """An upper bound of offsets within a tile."""
    constants: dict[str, Any]

    @property
    def bundles(self) -> int:
        """Of tiles, in a group, where their sums are added up in two steps."""
        most, fan = max(self.tiles, self.last_tiles), int(self.constants["FAN"])
        return -(-most // fan) if self.constants["TREE"] else 0


AHEAD = 20 << 20
"""Bytes of input between statistics and normalisation beyond a group: what crosses device memory
while a group's last tile is read, its sums are added up and the news gets around, some 9 us."""

LARGE = 16 << 20
"""Bytes of input in a group from which fewer channels share one, for all to stay in the cache."""


@lru_cache(maxsize=1024)
def tuning(
    shape: tuple[int, ...], dtype: torch.dtype, planes: bool, ghost: int, backward: bool
) -> Tuning:
    """Settings that do well for such a batch on a Hopper GPU."""
    pixels, tensors = _product(shape[2:]), 2 if backward else 1
    column = max(ghost_sizes(shape[0], ghost)) * pixels * dtype.itemsize * tensors
    # In rows, a line of the cache (128 bytes) at a stretch, or half; in planes, half a kilobyte.
    channels = max(1, 512 // pixels) if planes else 128 // dtype.itemsize
    if not planes and min(channels, shape[1]) * column > LARGE:
        channels //= 2
    base = Tuning(channels=channels)
    subtiles = base.subtiles
    load = base.warps * LANES * VECTOR_BYTES * base.vectors
    while subtiles > 1 and _product(shape) * dtype.itemsize < 1024 * subtiles * load:
        subtiles //= 2  # enough tickets for everyone
    return replace(base, subtiles=subtiles, lookahead=AHEAD // (subtiles * load * tensors))


@lru_cache(maxsize=1024)
def plan(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    planes: bool,
    ghost: int,
    settings: Tuning,
    multiprocessors: int,
) -> Plan:
    """Cut a batch into tiles: a pure function of its shape and of the settings."""
    sizes = ghost_sizes(shape[0], ghost)
    C, S = shape[1], _product(shape[2:])
    ghost_rows, last_rows = sizes[0] * S, sizes[-1] * S
    most_rows = max(ghost_rows, last_rows)
    threads = settings.warps * LANES * (VECTOR_BYTES // dtype.itemsize)
    BC = _channel_block(C, min(settings.channels, threads))
    R = min(threads // BC, triton.next_power_of_2(most_rows))
    U = min(settings.vectors, triton.next_power_of_2(triton.cdiv(most_rows, R)))
    SUB = min(settings.subtiles, triton.cdiv(most_rows, U * R))
    step = SUB * U * R
    tiles, last_tiles = triton.cdiv(ghost_rows, step), triton.cdiv(last_rows, step)
    blocks = triton.cdiv(C, BC)
    total = ((len(sizes) - 1) * tiles + last_tiles) * blocks
    group = max(tiles, last_tiles)
    delay = group + min(settings.lookahead, total - group)
    constants = {
        "S": S if planes else 1,
        "PLANES": planes,
        "EVEN": ghost_rows % step == last_rows % step == C % BC == 0,
        **{"U": U, "R": R, "BC": BC, "SUB": SUB},
        "FAN": (fan := min(triton.next_power_of_2(group), settings.fan)),
        "TREE": group > fan,
        "ALIGN": (align := math.gcd(C, 16)),
        "LOOP": settings.programs > 0,
        "STREAM": settings.stream,
        "num_warps": settings.warps,
        "num_stages": 1,
        "maxnreg": settings.registers,
    }
    return Plan(
        *(len(sizes), C // align, ghost_rows, last_rows, tiles, last_tiles, blocks, delay),
        grid=min(settings.programs * multiprocessors or total + delay, total + delay),
        reach=C * (step + 2 * S if planes else step),
        constants=constants,
    )


def _channel_block(channels: int, most: int) -> int:
    """A power of two of channels: one that divides, or the smallest that holds them all."""
    most = 1 << (most.bit_length() - 1)
    divisor = channels & -channels
    if divisor >= min(most, 32) or channels > most:
        return min(divisor if divisor >= 16 else most, most)
    return min(int(triton.next_power_of_2(channels)), most)


def _product(sizes: tuple[int, ...]) -> int:
    product = 1
    for size in sizes:
        product *= size
    return product


def plan_for(x: Tensor, ghost: int, settings: Tuning | None, backward: bool) -> Plan:
    """The plan for a batch that is dense, in rows or in planes."""
    planes = not in_rows(x)
    shape = tuple(x.shape)
    chosen = settings or tuning(shape, x.dtype, planes, ghost, backward)
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
    settings: Tuning | None = None,
) -> tuple[Tensor, Tensor]:
    """As `plain.forward`, in one kernel."""
    y = torch.empty_like(x)
    dense, out = workable(x, y)
    residual = None if residual is None else as_dense_as(dense, residual)
    cut = plan_for(dense, ghost, settings, backward=False)
    table = x.new_empty(3, cut.ghosts, x.shape[1], dtype=torch.float32)
    parts, counters = _scratch(x, cut)
    _launch(
        kernels.forward_kernel,
        cut,
        *(dense, _or(residual, dense), out, _or(weight, dense), _or(bias, dense)),
        *(table, parts, counters, eps),
        WEIGHT=weight is not None,
        BIAS=bias is not None,
        RESIDUAL=residual is not None,
        RELU=activation == "relu",
    )
    if out is not y:
        y.copy_(out)
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


def move_running(
    mean: Tensor,
    var: Tensor,
    tracked: Tensor | None,
    moments: Tensor,
    momentum: float,
    running: str,
) -> None:
    """Move the running statistics by the ghosts' (2, K, C), oldest first, in one kernel."""
    _, ghosts, channels = moments.shape
    decay, log_decay = 1 - momentum, -1e30
    if running == "mean":
        count, keep, rate, log_decay = 1, decay, momentum / ghosts, 0.0
    else:
        count, keep, rate = ghosts, decay**ghosts, momentum
        log_decay = math.log2(decay) if decay > 0 else log_decay
    rows = min(triton.next_power_of_2(ghosts), 64)
    block = min(triton.next_power_of_2(channels), 32)
    arguments = (mean, var, mean if tracked is None else tracked, moments, moments.stride(0))
    with _on(mean.device):
        running_kernel[(triton.cdiv(channels, block),)](
            *arguments,
            *(ghosts, channels, count, keep, rate, log_decay),
            TRACKED=tracked is not None,
            R=rows,
            BC=block,
        )
    for moved in (mean, var, *(() if tracked is None else (tracked,))):
        torch.autograd.graph.increment_version(moved)


def _or(tensor: Tensor | None, other: Tensor) -> Tensor:
    """A kernel takes some tensor in the place of one that is not there, and never reads it."""
    return other if tensor is None else tensor.contiguous() if tensor.dim() == 1 else tensor


def _scratch(x: Tensor, cut: Plan) -> tuple[Tensor, Tensor]:
    """Room for the sums of tiles, and counters, which start at zero: the one thing cleared."""
    groups = cut.ghosts * cut.blocks
    rows = groups * (max(cut.tiles, cut.last_tiles) + cut.bundles)
    parts = x.new_empty(rows * 2 * int(cut.constants["BC"]), dtype=torch.float32)
    counters = 1 + groups * (1 + cut.bundles) + cut.blocks
    return parts, x.new_zeros(counters, dtype=torch.int32)


def _launch(kernel: Any, cut: Plan, *tensors: Any, **constants: bool) -> None:
    with _on(tensors[0].device):
        kernel[(cut.grid,)](*tensors, *cut[:8], **constants, **cut.constants)


def _on(device: torch.device) -> AbstractContextManager[object]:
    """Triton launches on the current device, so make it this one."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
