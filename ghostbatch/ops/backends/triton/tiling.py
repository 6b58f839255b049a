"""How a batch is cut into tiles for the kernels, and with which settings."""

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch

from ghostbatch.ops.reference import ghost_sizes

VECTOR_BYTES = 16
"""Bytes that a thread loads at once."""

LANES = 32
"""Threads in a warp."""


@dataclass(frozen=True)
class Tuning:
    """Settings of a kernel: they affect its speed, and results only by the rounding of sums."""

    warps: int = 4
    vectors: int = 8
    """Vectors of 16 bytes that a thread loads before it uses the first."""
    subtiles: int = 2
    """Rounds of such loads in a ticket."""
    channels: int = 64
    """Channels that are normalised together, at most."""
    programs: int = 0
    """Programs on each multiprocessor, which take tickets until none is left; 0: one per ticket."""
    lookahead: int = 264
    """Tickets between statistics and normalisation, beyond one group."""
    registers: int | None = 128
    """Registers per thread, at most: four programs then share a multiprocessor."""
    fan: int = 128
    """Sums of tiles that one program adds up at once, at most."""
    stream: int = 2
    """Hints to the L2 cache: 0 none, 1 for values not read again soon, 2 also for the others."""


@dataclass(frozen=True)
class TilePlan:
    """A batch cut into tiles, as `kernels` explains."""

    grid: int
    """Programs to launch."""
    partial_sums: int
    """fp32 values of scratch space for the sums over tiles."""
    counters: int
    largest_offset: int
    """An upper bound of the offsets that the kernels compute in 32 bits."""
    arguments: dict[str, Any]
    """Arguments that both kernels take, by name."""


CACHED = 48 << 20
"""About how many bytes of input the L2 cache of a Hopper GPU holds."""

LARGE = 8 << 20
"""Bytes of a group from which it pays to look further ahead."""


@lru_cache(maxsize=1024)
def tuning(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    planes: bool,
    backward: bool,
    ghost: int,
    residual: bool = False,
) -> Tuning:
    """Return settings that do well on an H200: sweeps over eight shapes, with ghosts of 128."""
    values, pixels = math.prod(shape), math.prod(shape[2:])
    # In rows, a line of the cache or two (128 bytes) at a stretch; in planes, half a kilobyte.
    channels = max(1, 512 // pixels) if planes else 64
    base = Tuning(channels=channels)
    small = values * dtype.itemsize <= CACHED
    group = min(ghost, shape[0]) * pixels * min(channels, shape[1]) * dtype.itemsize
    if planes:
        base = replace(base, subtiles=1, lookahead=264 if backward or not small else 1056)
    elif dtype.itemsize == 4:
        base = replace(base, lookahead=528 if group > LARGE else 264)
    elif backward and residual:
        base = replace(base, registers=200, lookahead=132 if group > LARGE else 66)
    elif backward and (small or group > LARGE):
        base = replace(base, vectors=4, subtiles=4, lookahead=66 if small else 132)
    elif backward:
        base = replace(base, registers=160, lookahead=66)
    else:
        lookahead = 1056 if small else 528 if group > LARGE else 132
        base = replace(base, registers=128 if residual else 96, lookahead=lookahead)
    if backward and residual and (planes or dtype.itemsize == 4):
        base = replace(base, vectors=4, subtiles=2 * base.subtiles)  # registers hold no more
    subtiles, load = base.subtiles, base.warps * LANES * VECTOR_BYTES * base.vectors
    while subtiles > 1 and values * dtype.itemsize < 1024 * subtiles * load:
        subtiles //= 2  # so that there are tickets for all multiprocessors
    return replace(base, subtiles=subtiles)


@lru_cache(maxsize=1024)
def make_plan(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    planes: bool,
    ghost: int,
    settings: Tuning,
    multiprocessors: int,
) -> TilePlan:
    """Cut a batch into tiles: a pure function of its shape and of the settings."""
    sizes = ghost_sizes(shape[0], ghost)
    C, S = shape[1], math.prod(shape[2:])
    ghost_rows, last_rows = sizes[0] * S, sizes[-1] * S
    U, R, BC, SUB = _tile_shape(C, max(ghost_rows, last_rows), dtype, settings)
    tile_rows = SUB * U * R
    tiles, last_tiles = cdiv(ghost_rows, tile_rows), cdiv(last_rows, tile_rows)
    most_tiles, blocks = max(tiles, last_tiles), cdiv(C, BC)
    total = ((len(sizes) - 1) * tiles + last_tiles) * blocks
    delay = most_tiles + min(settings.lookahead, total - most_tiles)
    registers = 16 * settings.warps * LANES  # adding up must not need more than the rest does
    fan = min(power_of_two(most_tiles), settings.fan, max(8, registers // BC))
    bundles = cdiv(most_tiles, fan) if most_tiles > fan else 0
    align = math.gcd(C, 16)
    tickets, groups = total + delay, len(sizes) * blocks
    grid = min(settings.programs * multiprocessors or tickets, tickets)
    arguments = {
        "ghosts": len(sizes),
        "aligned": C // align,
        "ghost_rows": ghost_rows,
        "last_rows": last_rows,
        "tiles": tiles,
        "last_tiles": last_tiles,
        "blocks": blocks,
        "delay": delay,
        "tickets_per_run": tickets + grid if settings.programs else tickets,
        "S": S if planes else 1,
        "PLANES": planes,
        "EVEN": ghost_rows % tile_rows == last_rows % tile_rows == C % BC == 0,
        "U": U,
        "R": R,
        "BC": BC,
        "SUB": SUB,
        "FAN": fan,
        "TREE": bundles > 0,
        "ALIGN": align,
        "LOOP": settings.programs > 0,
        "STREAM": settings.stream,
        "num_warps": settings.warps,
        "num_stages": 1,
        "maxnreg": settings.registers,
    }
    reach = C * (tile_rows + 2 * S if planes else tile_rows)
    return TilePlan(
        grid=grid,
        partial_sums=groups * (most_tiles + bundles) * 2 * BC,
        counters=1 + groups * (1 + bundles) + blocks,
        largest_offset=max(reach, last_rows, 4 * len(sizes) * C),
        arguments=arguments,
    )


def _tile_shape(
    channels: int, rows: int, dtype: torch.dtype, settings: Tuning
) -> tuple[int, int, int, int]:
    """Return U, R, BC and SUB, as `kernels` uses them, for ghosts of ``rows`` rows."""
    threads = settings.warps * LANES * (VECTOR_BYTES // dtype.itemsize)
    BC = _channel_block(channels, min(settings.channels, threads))
    R = min(threads // BC, power_of_two(rows))
    U = min(settings.vectors, power_of_two(cdiv(rows, R)))
    return U, R, BC, min(settings.subtiles, cdiv(rows, U * R))


def _channel_block(channels: int, most: int) -> int:
    """Return a power of two of channels: one that divides, or the smallest that holds them all."""
    most = 1 << (most.bit_length() - 1)
    divisor = channels & -channels
    if divisor >= min(most, 32) or channels > most:
        return min(divisor if divisor >= 16 else most, most)
    return min(power_of_two(channels), most)


def power_of_two(size: int) -> int:
    """Return the smallest power of two that is not smaller than ``size``."""
    return 1 << (size - 1).bit_length()


def cdiv(size: int, step: int) -> int:
    """Return ``size / step``, rounded up."""
    return -(-size // step)
