"""The exponent alpha of the loss around a point: L(w0 + z v) - L(w0) ~ N(0, s^2 z^alpha).

For fixed alpha the most likely s^2 is the mean of dL^2 z^-alpha. The function of alpha to minimise,

    f(alpha) = ln mean(dL^2 z^-alpha) + alpha mean(ln z),

is convex: its slope is mean(ln z) minus the mean of ln z with weights dL^2 z^-alpha, and its
curvature is the variance of ln z with these weights. The observed information n f'' / 2 gives the
standard error. Samples are not binned, since bins would bias alpha.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, nan, sqrt

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

DEGREE = 3
"""Degree of the polynomial through the origin that models the mean trend of the loss."""


@dataclass(frozen=True)
class Roughness:
    """An exponent and its standard error."""

    alpha: float
    """NaN if fewer than two changes of the loss differ from 0."""
    alpha_stderr: float


@dataclass(frozen=True)
class Bins:
    """Deviations of the loss by distance, in bins of equal width; for figures."""

    distances: tuple[float, ...]
    """Mean distance in each bin that has samples."""
    rms: tuple[float, ...]
    """Root-mean-square of L - L(w0), which grows linearly with distance if alpha = 2."""
    rms_stderr: tuple[float, ...]
    deviations: tuple[float, ...]
    """Root-mean-square with the mean trend removed."""
    counts: tuple[int, ...]


def fit_roughness(distances: Sequence[float], changes: Sequence[float]) -> Roughness:
    """Return the maximum-likelihood exponent of the changes of the loss.

    >>> round(fit_roughness([1, 2, 3, 5], [2, -4, 6, -10]).alpha, 6)  # linear in distance
    2.0
    """
    z, change = np.asarray(distances, dtype=float), np.asarray(changes, dtype=float)
    valid = np.isfinite(change) & (z > 0)
    z, change = z[valid], change[valid]
    log_z, changed = np.log(z), change != 0
    if changed.sum() < 2 or np.ptp(log_z[changed]) == 0:
        return Roughness(nan, inf)
    log_square, x = 2 * np.log(np.abs(change[changed])), log_z[changed]
    low, high = -20.0, 20.0
    for _ in range(60):  # bisection: the slope rises with alpha
        alpha = (low + high) / 2
        centre, _ = _weighted_moments(log_square - alpha * x, x)
        low, high = (alpha, high) if centre > log_z.mean() else (low, alpha)
    _, variance = _weighted_moments(log_square - alpha * x, x)
    return Roughness(alpha, sqrt(2 / (len(log_z) * variance)) if variance > 0 else inf)


def _weighted_moments(log_weights: Array, values: Array) -> tuple[float, float]:
    """Return mean and variance of ``values``, whose weights are given by their logarithms."""
    weights = np.exp(log_weights - log_weights.max())
    weights /= weights.sum()
    mean = float(weights @ values)
    return mean, float(weights @ (values - mean) ** 2)


def detrend(distances: Sequence[float], changes: Sequence[float], alpha: float) -> Array:
    """Return the changes minus their mean trend; NaN if only rounding is left.

    The trend of the finite changes is a polynomial through the origin, by least squares with
    weights z^-alpha.
    """
    z, change = np.asarray(distances, dtype=float), np.asarray(changes, dtype=float)
    scale, finite = z.max(), np.isfinite(change)
    columns = (z[:, None] / scale) ** np.arange(1, DEGREE + 1)
    weight = np.maximum(z / scale, 1e-6) ** (-alpha / 2 if np.isfinite(alpha) else 0.0)
    weighted = (columns * weight[:, None])[finite], (change * weight)[finite]
    trend = np.linalg.lstsq(*weighted, rcond=None)[0]
    left = change - columns @ trend
    if np.linalg.norm((left * weight)[finite]) < 1e-7 * np.linalg.norm(weighted[1]):
        return np.full_like(change, nan)
    return np.asarray(left)


def bin_by_distance(
    distances: Sequence[float], changes: Sequence[float], count: int, radius: float
) -> Bins:
    """Return root-mean-square changes in ``count`` bins up to ``radius``, without empty bins."""
    z, change = np.asarray(distances, dtype=float), np.asarray(changes, dtype=float)
    left = detrend(distances, changes, fit_roughness(distances, changes).alpha)
    number = np.minimum((z / radius * count).astype(int), count - 1)
    rows = []
    for bin_number in np.unique(number):
        inside = number == bin_number
        squares = change[inside] ** 2
        rms = sqrt(squares.mean())
        n = len(squares)
        error = squares.std(ddof=1) / sqrt(n) / (2 * rms) if n > 1 and 0 < rms < inf else inf
        deviation = sqrt((left[inside] ** 2).mean())
        rows.append((float(z[inside].mean()), rms, float(error), deviation, n))
    return Bins(*(tuple(column) for column in zip(*rows, strict=True)))
