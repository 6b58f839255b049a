"""How a batch is cut into tiles for the kernels, and with which settings: functions of sizes."""

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from ghostbatch.ops.reference import ghost_sizes

VECTOR_BYTES = 16
"""What a thread loads at once."""

LANES = 32
"""Threads of a warp."""


@dataclass(frozen=True)
class Tuning:
    """What changes the speed of a kernel and nothing else, but for the rounding of sums."""

    warps: int = 4
    vectors: int = 8
    """Vectors of 16 bytes that a thread loads before it uses the first."""
    subtiles: int = 2
    """Rounds of such loads in a ticket."""
    channels: int = 64
    """Channels that are normalised together, at most."""
    programs: int = 0
    """Programs on each multiprocessor, which draw tickets until none is left; 0: one a ticket."""
    lookahead: int = 264
    """Tickets between statistics and normalisation, beyond one group."""
    registers: int | None = 128
    """Of a thread, at most: four programs then share a multiprocessor."""
    fan: int = 128
    """Sums of tiles that one program adds up at once, at most."""
    stream: int = 2
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
    draws: int
    """Of tickets, in all, also those that are none."""
    grid: int
    reach: int
    """An upper bound of offsets within a tile."""
    constants: dict[str, Any]

    @property
    def bundles(self) -> int:
        """Of tiles, in a group, where their sums are added up in two steps."""
        most, fan = max(self.tiles, self.last_tiles), int(self.constants["FAN"])
        return _parts(most, fan) if self.constants["TREE"] else 0


CACHED = 48 << 20
"""Bytes of input that the L2 cache of a Hopper GPU about holds."""

LARGE = 8 << 20
"""Bytes of a group from which it pays to look further ahead."""


@lru_cache(maxsize=1024)
def tuning(
    shape: tuple[int, ...], dtype: torch.dtype, planes: bool, backward: bool, ghost: int
) -> Tuning:
    """Settings that do well on an H200: those of a sweep over five shapes, with ghosts of 128."""
    values, pixels = _product(shape), _product(shape[2:])
    # In rows, a line of the cache or two (128 bytes) at a stretch; in planes, half a kilobyte.
    channels = max(1, 512 // pixels) if planes else 64
    base = Tuning(channels=channels)
    small = values * dtype.itemsize <= CACHED
    group = min(ghost, shape[0]) * pixels * min(channels, shape[1]) * dtype.itemsize
    if planes:
        base = replace(base, subtiles=1, lookahead=264 if backward or not small else 1056)
    elif dtype.itemsize == 4:
        base = replace(base, lookahead=528 if group > LARGE else 264)
    elif backward and (small or group > LARGE):
        base = replace(base, vectors=4, subtiles=4, lookahead=66 if small else 132)
    elif backward:
        base = replace(base, registers=160, lookahead=66)
    else:
        lookahead = 1056 if small else 528 if group > LARGE else 132
        base = replace(base, registers=96, lookahead=lookahead)
    subtiles, load = base.subtiles, base.warps * LANES * VECTOR_BYTES * base.vectors
    while subtiles > 1 and values * dtype.itemsize < 1024 * subtiles * load:
        subtiles //= 2  # enough tickets for everyone
    return replace(base, subtiles=subtiles)


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
    R = min(threads // BC, _power_of_two(most_rows))
    U = min(settings.vectors, _power_of_two(_parts(most_rows, R)))
    SUB = min(settings.subtiles, _parts(most_rows, U * R))
    step = SUB * U * R
    tiles, last_tiles = _parts(ghost_rows, step), _parts(last_rows, step)
    blocks = _parts(C, BC)
    total = ((len(sizes) - 1) * tiles + last_tiles) * blocks
    group = max(tiles, last_tiles)
    delay = group + min(settings.lookahead, total - group)
    registers = 16 * settings.warps * LANES  # adding up must not need more than the rest does
    constants = {
        "S": S if planes else 1,
        "PLANES": planes,
        "EVEN": ghost_rows % step == last_rows % step == C % BC == 0,
        **{"U": U, "R": R, "BC": BC, "SUB": SUB},
        "FAN": (fan := min(_power_of_two(group), settings.fan, max(8, registers // BC))),
        "TREE": group > fan,
        "ALIGN": (align := math.gcd(C, 16)),
        "LOOP": settings.programs > 0,
        "STREAM": settings.stream,
        "num_warps": settings.warps,
        "num_stages": 1,
        "maxnreg": settings.registers,
    }
    tickets = total + delay
    grid = min(settings.programs * multiprocessors or tickets, tickets)
    return Plan(
        *(len(sizes), C // align, ghost_rows, last_rows, tiles, last_tiles, blocks, delay),
        draws=tickets + grid if settings.programs else tickets,
        grid=grid,
        reach=C * (step + 2 * S if planes else step),
        constants=constants,
    )


def _channel_block(channels: int, most: int) -> int:
    """A power of two of channels: one that divides, or the smallest that holds them all."""
    most = 1 << (most.bit_length() - 1)
    divisor = channels & -channels
    if divisor >= min(most, 32) or channels > most:
        return min(divisor if divisor >= 16 else most, most)
    return min(_power_of_two(channels), most)


def _product(sizes: tuple[int, ...]) -> int:
    product = 1
    for size in sizes:
        product *= size
    return product


def _power_of_two(size: int) -> int:
    """The smallest one that is not smaller."""
    return 1 << (size - 1).bit_length()


def _parts(size: int, step: int) -> int:
    return -(-size // step)
