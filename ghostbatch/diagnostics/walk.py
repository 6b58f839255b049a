"""The paper's theory, simulated: a walker on a rough line against one on a flat line.

On a flat line a walker is at a distance of sqrt(t) after t steps. On a Brownian potential, whose
differences grow as E (V(x) - V(y))^2 = |x - y| (alpha = 1), it must climb ever higher barriers,
each in a time that is exponential in its height, and gets only (log t)^(2/alpha) = (log t)^2 far
(Sinai, 1982).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, log
from typing import Literal, get_args

import torch
from torch import Tensor

from ghostbatch.diagnostics.distance import log_spaced
from ghostbatch.errors import InputError

Potential = Literal["brownian", "flat"]

BLOCK = 256
"""Steps whose draws are made at once."""


@dataclass(frozen=True)
class Walk:
    """Distances of many walkers from where they began."""

    times: tuple[int, ...]
    """Steps done."""
    distances: tuple[float, ...]
    """Root-mean-square over the walkers."""
    stderrs: tuple[float, ...]


def random_walk(
    potential: Potential = "brownian",
    *,
    walkers: int = 1000,
    steps: int = 10_000,
    roughness: float = 1.0,
    seed: int = 0,
    device: str | torch.device = "cpu",
) -> Walk:
    """Walk many walkers, each on a line of its own, all of them in one tensor.

    Where it stands at x, a walker goes to x + 1 with probability 1 / (1 + exp(V(x+1) - V(x-1))) and
    to x - 1 otherwise. In the long run it crosses between x and x + 1 with a frequency that goes as
    exp(-V(x) - V(x+1)).

    Args:
        potential: "brownian", a sum of independent normal steps, or "flat".
        walkers: with as many potentials.
        steps: of every walker; distances are kept at times evenly spaced in log time.
        roughness: standard deviation of the potential's steps.
        seed: of potentials and walks.
        device: where they walk; another device draws other walks.

    >>> flat = random_walk("flat", walkers=400, steps=100)
    >>> 8 < flat.distances[-1] < 12
    True

    """
    _check(potential, walkers, steps, roughness)
    draw = torch.Generator(device).manual_seed(seed)
    reach = steps if potential == "flat" else min(steps, _reach(steps, roughness))
    right = None
    if potential == "brownian":
        right = chances(_potentials(walkers, reach, roughness, draw))
    places = torch.zeros(walkers, dtype=torch.long, device=draw.device)
    kept: list[Tensor] = []
    times = log_spaced(steps)
    for first in range(0, steps, BLOCK):
        draws = torch.rand(min(BLOCK, steps - first), walkers, generator=draw, device=draw.device)
        for offset, u in enumerate(draws):
            chance = 0.5 if right is None else right.gather(1, places[:, None] + reach)[:, 0]
            places = places + torch.where(u < chance, 1, -1)
            if first + offset + 1 == times[len(kept)]:
                kept.append(places)
    return _sum_up(times, torch.stack(kept).double() ** 2)


def exact_walk(
    potential: Potential = "brownian",
    *,
    lines: int = 50,
    doublings: int = 20,
    roughness: float = 1.0,
    reach: int = 100,
    seed: int = 0,
) -> Walk:
    """The mean over all walks on each of some lines, at the times 1, 2, 4, ..., 2^doublings.

    It squares the matrix of transition probabilities again and again: times are reached that no
    walker reaches, and there is no noise but that of the lines. Walkers turn back at ``reach``.
    """
    _check(potential, lines, 2, roughness)
    draw = torch.Generator().manual_seed(seed)
    heights = _potentials(lines, reach, roughness, draw).double()
    right = chances(heights if potential == "brownian" else torch.zeros_like(heights))
    matrix = torch.diag_embed(right[:, :-1], 1) + torch.diag_embed(1 - right[:, 1:], -1)
    squares = torch.arange(-reach, reach + 1, dtype=torch.float64) ** 2
    means = []
    for doubling in range(doublings + 1):
        matrix = matrix if doubling == 0 else matrix @ matrix
        means.append(matrix[:, reach] @ squares)
    return _sum_up([2**k for k in range(doublings + 1)], torch.stack(means))


def chances(heights: Tensor) -> Tensor:
    """Probabilities (lines, places) of a step to the right; at the ends there is no choice."""
    right = torch.empty_like(heights)
    right[:, 1:-1] = torch.sigmoid(heights[:, :-2] - heights[:, 2:])
    right[:, 0], right[:, -1] = 1.0, 0.0
    return right


def _potentials(lines: int, reach: int, roughness: float, draw: torch.Generator) -> Tensor:
    """Brownian heights (lines, 2 reach + 1); their origin does not matter."""
    size = (lines, 2 * reach + 1)
    return roughness * torch.randn(size, generator=draw, device=draw.device).cumsum(1)


def _reach(steps: int, roughness: float) -> int:
    """Places either way that a walker will hardly leave: ten times Sinai's (ln t / roughness)^2."""
    return 20 + ceil(10 * (log(steps) / roughness) ** 2)


def _sum_up(times: Sequence[int], squares: Tensor) -> Walk:
    """Root-mean-squares over the last dimension, and their errors."""
    mean, count = squares.mean(1), squares.shape[1]
    root = mean.sqrt()
    error = squares.std(1) / count**0.5 / (2 * root.clamp(min=1e-300))
    return Walk(tuple(times), tuple(root.tolist()), tuple(error.tolist()))


def _check(potential: str, walkers: int, steps: int, roughness: float) -> None:
    if potential not in get_args(Potential):
        known = ", ".join(get_args(Potential))
        raise InputError("potential", f"{potential!r} is unknown", f"choose one of {known}")
    for field, number in (("walkers", walkers), ("steps", steps)):
        if number < 2:
            raise InputError(field, f"{number} is below 2", "use 1000")
    if not roughness > 0:
        raise InputError("roughness", f"{roughness} is not above 0", "use 1, or a flat potential")
