"""Random walks on a Brownian and on a flat potential: the paper's theory of diffusion, simulated.

On a flat potential the root-mean-square distance after t steps is sqrt(t). On a Brownian potential,
E (V(x) - V(y))^2 = |x - y| (alpha = 1), the time to cross a barrier is exponential in its height,
so the distance grows only as (log t)^(2/alpha) = (log t)^2 (Sinai, 1982).
"""

from dataclasses import dataclass
from math import ceil, log
from typing import Literal, get_args

import torch
from torch import Tensor

from ghostbatch.diagnostics.distance import log_spaced
from ghostbatch.errors import InputError, check_choice

Potential = Literal["brownian", "flat"]

BLOCK = 256
"""Number of steps whose random numbers are drawn at once."""


@dataclass(frozen=True)
class Walk:
    """Distances of many walkers from their starting points."""

    times: tuple[int, ...]
    """Numbers of steps."""
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
) -> Walk:
    """Simulate many walkers at once, each on its own potential.

    At x a walker goes to x + 1 with probability 1 / (1 + exp(V(x+1) - V(x-1))) and to x - 1
    otherwise. Its crossings between x and x + 1 have a frequency ~ exp(-V(x) - V(x+1)).

    Args:
        potential: "brownian", a sum of independent normal steps, or "flat".
        walkers: number of walkers.
        steps: steps per walker; distances are recorded at times evenly spaced in log time.
        roughness: standard deviation of the potential's steps.
        seed: seeds potentials and walks.

    >>> flat = random_walk("flat", walkers=400, steps=100)
    >>> 8 < flat.distances[-1] < 12
    True

    """
    check_choice("potential", potential, get_args(Potential))
    for field, number in (("walkers", walkers), ("steps", steps)):
        if number < 2:
            raise InputError(field, f"{number} is below 2", "use 1000")
    if not roughness > 0:
        raise InputError("roughness", f"{roughness} is not above 0", "use 1, or the flat potential")
    draw = torch.Generator().manual_seed(seed)
    right = None
    if potential == "brownian":
        # Walkers hardly exceed ten times Sinai's distance (ln t / roughness)^2.
        reach = min(steps, 20 + ceil(10 * (log(steps) / roughness) ** 2))
        normal = torch.randn(walkers, 2 * reach + 1, generator=draw)
        right = right_probabilities(roughness * normal.cumsum(1))
    positions = torch.zeros(walkers, dtype=torch.long)
    recorded: list[Tensor] = []
    times = log_spaced(steps)
    for first in range(0, steps, BLOCK):
        draws = torch.rand(min(BLOCK, steps - first), walkers, generator=draw)
        for step, u in enumerate(draws, start=first + 1):
            p = 0.5 if right is None else right.gather(1, positions[:, None] + reach)[:, 0]
            positions = positions + torch.where(u < p, 1, -1)
            if step == times[len(recorded)]:
                recorded.append(positions)
    squares = torch.stack(recorded).double() ** 2
    distances = squares.mean(1).sqrt()
    stderrs = squares.std(1) / walkers**0.5 / (2 * distances.clamp(min=1e-300))
    return Walk(tuple(times), tuple(distances.tolist()), tuple(stderrs.tolist()))


def right_probabilities(heights: Tensor) -> Tensor:
    """Return probabilities (lines, positions) of a step to the right; walkers turn at the ends."""
    right = torch.empty_like(heights)
    right[:, 1:-1] = torch.sigmoid(heights[:, :-2] - heights[:, 2:])
    right[:, 0], right[:, -1] = 1.0, 0.0
    return right
