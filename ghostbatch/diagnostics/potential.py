"""The loss around a point as a random potential: how it deviates along random directions.

The paper's appendix B: at the initial weights w0, draw a random unit direction v over all
trainable parameters and a distance z ~ U[0, c], and record L(w0 + z v); a thousand times. Any
smooth loss with a gradient gives alpha = 2 at small z, so look at several radii
(`RandomPotential.within`) and at the deviation with the mean trend removed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from ghostbatch.diagnostics.roughness import (
    Bins,
    Roughness,
    bin_by_distance,
    detrend,
    fit_roughness,
)
from ghostbatch.diagnostics.scan import Scan, Surroundings, batch_statistics, key
from ghostbatch.errors import InputError

Loss = Callable[[nn.Module], Tensor | float]


@dataclass(frozen=True)
class RandomPotential:
    """Losses at random places around a point, and the exponent of their deviation."""

    distances: tuple[float, ...]
    losses: tuple[float, ...]
    origin: float
    """The loss at the point itself."""
    radius: float
    alpha: float
    """Most likely exponent of (L - origin) ~ N(0, s^2 z^alpha); the paper's theory wants 2."""
    alpha_stderr: float
    """From the observed information: it takes that law and independent samples for granted.

    Samples share L at the origin. On planted rough fields (alpha 1) that alone spread alpha by 0.13
    from one field to the next, however many the samples.
    """
    binned: dict[int, Bins]
    """Root-mean-square deviations by distance, for each number of bins asked for."""

    @property
    def changes(self) -> tuple[float, ...]:
        """L - origin."""
        return tuple(loss - self.origin for loss in self.losses)

    @cached_property
    def detrended(self) -> Roughness:
        """The exponent of what is left when the mean trend of the loss is removed."""
        left = detrend(self.distances, self.changes, self.alpha)
        return fit_roughness(self.distances, left.tolist())

    def within(self, radius: float) -> "RandomPotential":
        """The part of the scan up to a smaller radius: distances are uniform there too."""
        near = [i for i, z in enumerate(self.distances) if z <= radius]
        if len(near) < 2 or not 0 < radius <= self.radius:
            raise InputError(
                "radius", f"{radius} holds {len(near)} samples", f"use {self.radius} or less"
            )
        return sum_up(
            [self.distances[i] for i in near],
            [self.losses[i] for i in near],
            self.origin,
            radius,
            tuple(self.binned),
        )


@torch.no_grad()
def random_potential(
    model: nn.Module,
    loss: Loss,
    *,
    radius: float,
    samples: int = 1000,
    seed: int = 0,
    bins: Sequence[int] = (10, 20, 50),
    resume: str | Path | None = None,
    on_sample: Callable[[int], None] | None = None,
) -> RandomPotential:
    """Measure the loss at random distances in random directions from where the model is.

    While it measures, batch norm layers normalise by the statistics of the batch at hand and every
    other layer is in evaluation mode (no dropout). Whatever happens, parameters, buffers and modes
    are afterwards what they were, bit by bit. Directions are drawn on the parameters' device, and
    again from their seed when they are needed: the same seed gives the same ones on one kind of
    device. Deviations near the rounding of the loss bend alpha, so measure in fp32 or better.

    Args:
        model: stands at the point; trainable parameters are moved.
        loss: a function of the model, the same at every call; `BatchedLoss` makes one of data.
        radius: largest distance; that of the training runs, and 10 as in the paper.
        samples: directions.
        seed: of directions and distances.
        bins: numbers of bins of the figure's root-mean-square deviations.
        resume: a file that keeps what was measured, so that an interrupted scan goes on.
        on_sample: called with the number of samples done.

    >>> model = nn.Linear(50, 1, bias=False)
    >>> with torch.no_grad():
    ...     _ = model.weight.zero_()
    >>> bowl = random_potential(model, lambda m: m.weight.square().sum(), radius=3, samples=50)
    >>> round(bowl.alpha, 3), bowl.origin
    (4.0, 0.0)

    """
    _check(radius, samples, bins)
    draw = np.random.default_rng(key(seed, "distances"))
    distances = draw.uniform(0, radius, samples).tolist()
    with batch_statistics(model), Surroundings(model) as around:
        origin = float(loss(model))
        recipe = {"radius": radius, "seed": seed, "weights": around.count, "origin": origin}
        with Scan(None if resume is None else Path(resume), recipe) as scan:
            for number in range(len(scan.losses), samples):
                around.step(distances[number], key(seed, "direction", number))
                scan.add(float(loss(model)))
                if on_sample is not None:
                    on_sample(number + 1)
        losses = scan.losses[:samples]
    return sum_up(distances, losses, origin, radius, bins)


def _check(radius: float, samples: int, bins: Sequence[int]) -> None:
    if not (np.isfinite(radius) and radius > 0):
        raise InputError("radius", f"{radius} is no distance", "use that of a training run")
    if samples < 2:
        raise InputError("samples", f"{samples} tell nothing of a law", "use 1000")
    if any(count < 1 for count in bins):
        raise InputError("bins", f"{tuple(bins)} are not all above 0", "use (10, 20, 50)")


def sum_up(
    distances: Sequence[float],
    losses: Sequence[float],
    origin: float,
    radius: float,
    bins: Sequence[int],
) -> RandomPotential:
    """The result of a scan, from what was measured."""
    changes = [loss - origin for loss in losses]
    found = fit_roughness(distances, changes)
    return RandomPotential(
        distances=tuple(distances),
        losses=tuple(losses),
        origin=origin,
        radius=radius,
        alpha=found.alpha,
        alpha_stderr=found.alpha_stderr,
        binned={count: bin_by_distance(distances, changes, count, radius) for count in bins},
    )
