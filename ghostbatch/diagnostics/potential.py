"""The loss at random points around the weights, and the exponent of its deviation.

The paper's appendix B: 1,000 times, draw a random unit direction v over all trainable parameters
and a distance z ~ U[0, c], and record the loss at w0 + z v, with w0 the initial weights. Any smooth
loss with a gradient gives alpha = 2 at small z, so look at several radii (`RandomPotential.within`)
and at the deviation with the mean trend removed.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from numbers import Real
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
from ghostbatch.diagnostics.scan import Scan, batch_statistics, random_steps
from ghostbatch.draws import key
from ghostbatch.errors import InputError, check_is, check_positive
from ghostbatch.optim.regime import check_above_zero


@dataclass(frozen=True)
class RandomPotential:
    """Losses at random points around the weights, and the exponent of their deviation."""

    distances: tuple[float, ...]
    losses: tuple[float, ...]
    origin: float
    """The loss at distance 0."""
    radius: float
    alpha: float
    """Maximum-likelihood exponent of (L - origin) ~ N(0, s^2 z^alpha); 2 in the paper."""
    alpha_stderr: float
    """From the observed information, which assumes this law and independent samples.

    Samples share L at the origin, which alone spread alpha by 0.13 between simulated rough fields.
    """
    binned: dict[int, Bins]
    """Root-mean-square deviations by distance, for each number of bins."""

    @classmethod
    def from_losses(
        cls,
        distances: Sequence[float],
        losses: Sequence[float],
        origin: float,
        radius: float,
        bins: Sequence[int],
    ) -> "RandomPotential":
        """Fit the exponent to measured losses, and bin them."""
        changes = [loss - origin for loss in losses]
        found = fit_roughness(distances, changes)
        binned = {count: bin_by_distance(distances, changes, count, radius) for count in bins}
        measured = tuple(distances), tuple(losses), origin, radius
        return cls(*measured, found.alpha, found.alpha_stderr, binned)

    @property
    def changes(self) -> tuple[float, ...]:
        """L - origin."""
        return tuple(loss - self.origin for loss in self.losses)

    @cached_property
    def detrended(self) -> Roughness:
        """The exponent with the mean trend of the loss removed."""
        left = detrend(self.distances, self.changes, self.alpha)
        return fit_roughness(self.distances, left.tolist())

    def within(self, radius: float) -> "RandomPotential":
        """Return the result of the samples up to a smaller radius; they are uniform there too."""
        samples = zip(self.distances, self.losses, strict=True)
        near = [(z, loss) for z, loss in samples if z <= radius]
        if len(near) < 2 or not 0 < radius <= self.radius:
            problem = f"{radius} holds {len(near)} samples"
            raise InputError("radius", problem, f"use {self.radius} or less")
        distances, losses = zip(*near, strict=True)
        return self.from_losses(distances, losses, self.origin, radius, tuple(self.binned))


@torch.no_grad()
def random_potential(
    model: nn.Module,
    loss: Callable[[nn.Module], Tensor | float],
    *,
    radius: float,
    samples: int = 1000,
    seed: int = 0,
    bins: Sequence[int] = (10, 20, 50),
    resume: str | Path | None = None,
    on_sample: Callable[[int], None] | None = None,
) -> RandomPotential:
    """Measure the loss at random distances in random directions from the model's weights.

    Meanwhile batch norm layers use batch statistics, and every other layer is in evaluation mode
    (no dropout). Afterwards, also after an error, parameters, buffers and modes are bit for bit
    what they were. The same seed gives the same directions on one kind of device. Changes of the
    loss that are near its rounding bias alpha, so measure in fp32 or better.

    Args:
        model: its trainable parameters are the point to start from.
        loss: a deterministic function of the model; `BatchedLoss` makes one from data.
        radius: largest distance, such as that of the training runs, or 10 as in the paper.
        samples: number of directions.
        seed: seeds directions and distances.
        bins: numbers of bins for the root-mean-square deviations.
        resume: a file that keeps the losses, from which an interrupted scan continues.
        on_sample: called with the number of samples done.

    >>> model = nn.Linear(50, 1, bias=False)
    >>> with torch.no_grad():
    ...     _ = model.weight.zero_()
    >>> bowl = random_potential(model, lambda m: m.weight.square().sum(), radius=3, samples=50)
    >>> round(bowl.alpha, 3), bowl.origin
    (4.0, 0.0)

    """
    check_is("model", model, nn.Module, "a torch.nn.Module")
    check_is("radius", radius, Real, "a number")
    check_above_zero("radius", float(radius))
    check_is("bins", bins, Iterable, "a sequence of numbers")
    bins = tuple(bins)
    check_positive(samples=samples)
    for count in bins:
        check_positive(bins=count)
    if samples < 2:
        raise InputError("samples", f"{samples} is below 2", "use 1000")
    draw = np.random.default_rng(key(seed, "distances"))
    distances = draw.uniform(0, radius, samples).tolist()
    with batch_statistics(model), random_steps(model) as move:
        origin = _value(loss(model))
        count = sum(p.numel() for p in model.parameters() if p.requires_grad)
        settings = {"radius": radius, "seed": seed, "weights": count, "origin": origin}
        scan = Scan(None if resume is None else Path(resume), settings)
        try:
            for number in range(len(scan.losses), samples):
                move(distances[number], key(seed, "direction", number))
                scan.add(_value(loss(model)))
                if on_sample is not None:
                    on_sample(number + 1)
        finally:
            scan.write()
    return RandomPotential.from_losses(distances, scan.losses[:samples], origin, radius, bins)


def _value(loss: Tensor | float) -> float:
    """Return a loss as a number; refuse anything else."""
    try:
        return float(loss)
    except (TypeError, ValueError, RuntimeError):
        raise InputError("loss", "its result is not one number", "return the mean loss") from None
