"""How the loss deviates with distance: L(w0 + z v) - L(w0) ~ N(0, s^2 z^alpha).

For fixed alpha the likelihood's best s^2 is the mean of dL^2 z^-alpha. What is left to minimise,

    f(alpha) = ln mean(dL^2 z^-alpha) + alpha mean(ln z),

is convex: its slope is mean(ln z) minus the mean of ln z weighted by dL^2 z^-alpha, its curvature
the variance of ln z so weighted. Observed information n f'' / 2 gives the standard error. No bins:
they would bias alpha.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, nan, sqrt

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

DEGREE = 3
"""Of the polynomial through the origin that stands for the mean trend of the loss."""


@dataclass(frozen=True)
class Roughness:
    """An exponent with its error."""

    alpha: float
    """NaN where there is no deviation to speak of."""
    alpha_stderr: float


@dataclass(frozen=True)
class Bins:
    """Deviations of the loss by distance, in bins of equal width; for figures."""

    distances: tuple[float, ...]
    """Mean distance in each bin that has samples."""
    rms: tuple[float, ...]
    """Root-mean-square of L - L(w0): grows linearly with distance if alpha = 2."""
    rms_stderr: tuple[float, ...]
    deviations: tuple[float, ...]
    """The same with the mean trend removed."""
    counts: tuple[int, ...]


def fit_roughness(distances: Sequence[float], changes: Sequence[float]) -> Roughness:
    """The exponent that makes the changes of the loss most likely.

    >>> round(fit_roughness([1, 2, 3, 5], [2, -4, 6, -10]).alpha, 6)  # linear in distance
    2.0
    """
    z, change = np.asarray(distances, dtype=float), np.asarray(changes, dtype=float)
    sound = np.isfinite(change) & (z > 0)
    z, change = z[sound], change[sound]
    log_z, usable = np.log(z), change != 0
    if usable.sum() < 2 or np.ptp(log_z[usable]) == 0:
        return Roughness(nan, inf)
    log_square, where = 2 * np.log(np.abs(change[usable])), log_z[usable]
    low, high = -20.0, 20.0
    for _ in range(60):  # the slope rises with alpha: bisection cannot miss
        alpha = (low + high) / 2
        centre, _ = _weighted(log_square - alpha * where, where)
        low, high = (alpha, high) if centre > log_z.mean() else (low, alpha)
    _, variance = _weighted(log_square - alpha * where, where)
    return Roughness(alpha, sqrt(2 / (len(log_z) * variance)) if variance > 0 else inf)


def _weighted(log_weights: Array, values: Array) -> tuple[float, float]:
    """Mean and variance of values under weights given by their logarithms."""
    weights = np.exp(log_weights - log_weights.max())
    weights /= weights.sum()
    mean = float(weights @ values)
    return mean, float(weights @ (values - mean) ** 2)


def detrend(distances: Sequence[float], changes: Sequence[float], alpha: float) -> Array:
    """What the mean trend of the changes leaves of them.

    The trend is a polynomial through the origin, by least squares with the weights z^-alpha that
    the deviations suggest; NaN where nothing but rounding is left.
    """
    z, change = np.asarray(distances, dtype=float), np.asarray(changes, dtype=float)
    scale = z.max()
    columns = (z[:, None] / scale) ** np.arange(1, DEGREE + 1)
    weight = np.maximum(z / scale, 1e-6) ** (-alpha / 2 if np.isfinite(alpha) else 0.0)
    trend = np.linalg.lstsq(columns * weight[:, None], change * weight, rcond=None)[0]
    left = change - columns @ trend
    if np.linalg.norm(left * weight) < 1e-7 * np.linalg.norm(change * weight):
        return np.full_like(change, nan)
    return np.asarray(left)


def bin_by_distance(
    distances: Sequence[float], changes: Sequence[float], count: int, radius: float
) -> Bins:
    """Root-mean-square changes in ``count`` bins up to ``radius``; empty bins are left out."""
    z, change = np.asarray(distances, dtype=float), np.asarray(changes, dtype=float)
    left = detrend(distances, changes, fit_roughness(distances, changes).alpha)
    number = np.minimum((z / radius * count).astype(int), count - 1)
    rows = []
    for bin_number in np.unique(number):
        inside = number == bin_number
        squares = change[inside] ** 2
        rms = sqrt(squares.mean())
        n = len(squares)
        error = squares.std(ddof=1) / sqrt(n) / (2 * rms) if n > 1 and rms > 0 else inf
        deviation = sqrt((left[inside] ** 2).mean())
        rows.append((float(z[inside].mean()), rms, float(error), deviation, n))
    return Bins(*(tuple(column) for column in zip(*rows, strict=True)))
