"""How rates, Adam's betas, or gradient noise instead, follow the batch size; label noise."""

from fractions import Fraction
from math import floor, isqrt, sqrt
from numbers import Integral
from typing import Literal

import torch
from torch import Tensor

from ghostbatch.errors import InputError, check_choice, check_is, check_positive

Rule = Literal["none", "sqrt", "linear"]
"""How a rate follows batch / base_batch: not at all, with its square root, or in proportion."""


def lr_scale(batch: int, base_batch: int, rule: Rule = "sqrt") -> float:
    """Return the factor on every learning rate when the batch grows from ``base_batch``.

    The covariance of a weight increment is about (lr^2 / batch) times the covariance of one
    sample's gradient, so lr ~ sqrt(batch) keeps it constant.

    >>> lr_scale(4096, 128), lr_scale(4096, 128, "linear"), lr_scale(4096, 128, "none")
    (5.656854249492381, 32.0, 1.0)
    """
    check_positive(batch=batch, base_batch=base_batch)
    ratio = batch / base_batch
    factors = {"none": 1.0, "sqrt": sqrt(ratio), "linear": ratio}
    check_choice("lr_rule", rule, factors)
    return factors[rule]


DIGITS = 100
"""Decimals of a square root in `rate_batch`; no rounded number of updates needs more."""


def rate_batch(batch: int, base_batch: int, rule: Rule = "sqrt") -> int | Fraction:
    """Return the batch that turns epochs into updates so that the sum of learning rates is kept.

    It is ``base_batch`` times `lr_scale`: rates that are twice as large need half the updates of
    ``base_batch``. Pass it to `RegimeScheduler` or `update_at` as ``batch``. An irrational root is
    cut off after `DIGITS` decimals, so that epochs round to the same updates as with the exact one.

    >>> rate_batch(4096, 128, "linear"), rate_batch(4096, 128, "none"), rate_batch(512, 128)
    (4096, 128, 256)
    """
    lr_scale(batch, base_batch, rule)  # refuses what it cannot scale
    if rule != "sqrt":
        return batch if rule == "linear" else base_batch
    product = batch * base_batch
    root = isqrt(product)
    return root if root**2 == product else Fraction(isqrt(product * 100**DIGITS), 10**DIGITS)


def scale_adam(
    betas: tuple[float, float], eps: float, batch: int, base_batch: int
) -> tuple[tuple[float, float], float]:
    """Return the betas and the eps of Adam that belong to the square-root rule for its rate.

    With k = batch / base_batch they are 1 - k (1 - beta) and eps / sqrt(k) (Malladi et al. 2022):
    the averages then reach as many samples back as at ``base_batch``. Multiply the rate by
    `lr_scale`. The rule holds only while no beta falls below 0.

    torch.optim.AdamW multiplies the weight decay by the rate, so over one epoch it is sqrt(k) times
    weaker than at ``base_batch``. Multiply it by sqrt(k) to keep it; the rule does not cover it.

    >>> betas, eps = scale_adam((0.9, 0.999), 1e-8, batch=512, base_batch=128)
    >>> [round(beta, 6) for beta in betas], eps
    ([0.6, 0.996], 5e-09)
    """
    check_positive(batch=batch, base_batch=base_batch)
    check_betas(betas, eps)
    ratio = batch / base_batch
    beta1, beta2 = (1 - ratio * (1 - beta) for beta in betas)
    if (scaled := min(beta1, beta2)) < 0:
        least = min(betas)
        problem = f"{ratio:g} x base_batch, which scales Adam's beta of {least:g} to {scaled:.3g}"
        remedy = f"use {floor(base_batch / (1 - least))} or less, larger betas, or lr_rule linear"
        raise InputError("batch", f"{batch} is {problem}", remedy)
    return (beta1, beta2), eps / sqrt(ratio)


def check_betas(betas: tuple[float, float], eps: float, prefix: str = "") -> None:
    """Refuse betas that are not in [0, 1), and an eps that is not above 0."""
    for name, beta in zip(("beta1", "beta2"), betas, strict=True):
        if not 0 <= beta < 1:
            raise InputError(f"{prefix}{name}", f"{beta} is not in [0, 1)", "use 0.9, for example")
    if not 0 < eps < 1:
        raise InputError(f"{prefix}eps", f"{eps} is not in (0, 1)", "use 1e-8, for example")


def noise_weights(n: int, batch: int, base_batch: int, generator: torch.Generator) -> Tensor:
    """Return loss weights z ~ N(1, s2) for ``n`` samples, s2 = batch / base_batch - 1.

    The mean of the weighted gradients over a large batch then has the mean and the covariance that
    the small batch's mean gradient had, at an unchanged learning rate. The weights are on the
    generator's device.
    """
    check_positive(batch=batch, base_batch=base_batch)
    if batch < base_batch:
        problem = f"{batch} is below base_batch {base_batch}, so noise would have to be removed"
        raise InputError("batch", problem, "raise batch or turn noise off")
    check_is("generator", generator, torch.Generator, "a torch.Generator")
    if isinstance(n, bool) or not (isinstance(n, Integral) and n >= 0):
        raise InputError("n", f"{n!r} is not a number of samples", "use 0 or more")
    deviation = sqrt(batch / base_batch - 1)
    return 1 + deviation * torch.randn(n, generator=generator, device=generator.device)


def random_labels(
    n: int,
    classes: int,
    fraction: float,
    generator: torch.Generator | None = None,
    device: torch.device | None = None,
) -> Tensor:
    """Return new labels for ``n`` samples: a uniform class with probability ``fraction``, else -1.

    A sample with -1 keeps its own label. A drawn class may happen to be the right one.
    """
    replaced = torch.rand(n, generator=generator, device=device) < fraction
    drawn = torch.randint(classes, (n,), generator=generator, device=device)
    return torch.where(replaced, drawn, -1)
