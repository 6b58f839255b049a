"""Confidence intervals for least-squares fits whose residuals are autocorrelated.

The residuals of a curve recorded along one run are modelled as e_i = phi e_(i-1) + u_i. Blocks of
consecutive innovations u are resampled, which keeps dependence that phi misses. The curves made
from them are fitted again, and the interval is that of Student's ratio (estimate - truth) / error
over these curves: a post-blackened block bootstrap, studentised (Davison and Hinkley, *Bootstrap
Methods and their Application*, 1997, ch. 8). Three corrections matter for a few dozen points.

1. A fit lowers the lag-1 correlation of its residuals. phi is the correlation of the errors that
   gives, on average, the correlation found in the residuals.
2. The variance is the sum of squares over n - tr(H R), with H the projection of the fit and
   R_ij = phi^|i-j|; for phi = 0 that is the usual n - k.
3. Residuals are orthogonal to the fitted columns, so resampled blocks change a coefficient too
   little. Where its standard deviation over the resamples is below the one that phi implies, the
   ratios are scaled up.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Interval = tuple[float, float]

PHIS = np.linspace(0.0, 0.98, 50)
"""Candidates for phi. A negative correlation counts as 0, which makes intervals wider."""

TINY = float(np.finfo(float).tiny)
"""Replaces 0 as a divisor where a fit is perfect."""

REACH, STEPS = 8.0, 65
"""The exponent of a resampled curve is searched on a grid of STEPS, over REACH standard errors."""


@dataclass(frozen=True)
class LeastSquares:
    """A least-squares fit on fixed columns (n, k), and the effect of correlated errors on it."""

    inverse: Array
    """Pseudo-inverse of the columns, (k, n)."""
    basis: Array
    """Orthonormal basis of the columns, (n, k)."""
    fitted_by_lag: Array
    """tr(H R) is the sum of this times phi^lag."""
    variance_by_lag: Array
    """The variance of each coefficient, for errors of variance 1, is the sum times phi^lag."""

    @classmethod
    def on(cls, columns: Array) -> "LeastSquares":
        """Return the fit on ``columns`` (n, k)."""
        return cls.on_each(columns[None])[0]

    @classmethod
    def on_each(cls, columns: Array) -> list["LeastSquares"]:
        """Return the fits on each of ``columns`` (fits, n, k)."""
        inverses = np.linalg.pinv(columns).astype(float)
        bases = np.linalg.qr(columns)[0].astype(float)
        fitted = lag_sums(bases.swapaxes(-1, -2)).sum(-2)
        return list(map(cls, inverses, bases, fitted, lag_sums(inverses)))

    def residuals(self, curves: Array) -> Array:
        """Return the residuals of each curve (..., n)."""
        return np.asarray(curves - (curves @ self.basis) @ self.basis.T)

    def variance(self, residuals: Array, phi: Array) -> Array:
        """Return the variance of the errors, given residuals (..., n) and correlations (...)."""
        n = residuals.shape[-1]
        freedom = n - phi[..., None] ** np.arange(n) @ self.fitted_by_lag
        return np.asarray((residuals**2).sum(-1) / np.maximum(freedom, 0.5))

    def stderrs(self, residuals: Array, phi: Array) -> Array:
        """Return the standard errors (..., k) of the coefficients."""
        powers = phi[..., None] ** np.arange(residuals.shape[-1])
        variances = self.variance(residuals, phi)[..., None] * (powers @ self.variance_by_lag.T)
        return np.asarray(np.sqrt(np.maximum(variances, TINY)))

    @cached_property
    def _correlations(self) -> Array:
        """Lag-1 correlation of the residuals, for errors that have each of `PHIS`."""
        n = len(self.basis)
        lags = np.abs(np.subtract.outer(np.arange(n), np.arange(n))).ravel()
        projection = np.eye(n) - self.basis @ self.basis.T
        products = projection[:, :-1] @ projection[1:]  # of neighbours, as a quadratic form
        powers = PHIS[:, None] ** np.arange(n)
        neighbours, squares = (
            powers @ np.bincount(lags, m.ravel()) for m in (products, projection)
        )
        return np.asarray(np.maximum.accumulate(neighbours / squares))

    def phi(self, residuals: Array) -> Array:
        """Return the correlation of neighbouring errors, for residuals (..., n) of this fit."""
        found = (residuals[..., 1:] * residuals[..., :-1]).sum(-1)
        found = found / np.maximum((residuals**2).sum(-1), TINY)
        return np.asarray(np.interp(found, self._correlations, PHIS))


@dataclass(frozen=True)
class BlockBootstrap:
    """Draws ``resamples`` curves of noise that resembles given residuals."""

    resamples: int
    seed: int
    level: float
    """Probability of the intervals."""

    def noise(self, residuals: Array, phi: float, variance: Array) -> Array:
        """Return noise (resamples, n): blocks of about n^(1/3) innovations, filtered by phi."""
        n = len(residuals)
        innovations = residuals[1:] - phi * residuals[:-1]
        innovations = innovations - innovations.mean()
        scale = np.sqrt((innovations**2).mean()) or 1.0
        innovations *= np.sqrt(variance * (1 - phi**2)) / scale
        length = max(1, round(n ** (1 / 3)))
        draw = np.random.default_rng(self.seed)
        starts = draw.integers(n - 1, size=(self.resamples, -(-n // length)))
        chosen = (starts[..., None] + np.arange(length)) % (n - 1)
        noise = innovations[chosen.reshape(self.resamples, -1)[:, :n]]
        noise[:, 0] /= np.sqrt(1 - phi**2)  # the stationary variance
        for i in range(1, n):
            noise[:, i] += phi * noise[:, i - 1]
        return np.asarray(noise)

    def interval(self, estimate: float, error: float, ratios: Array) -> Interval:
        """Return the studentised interval, given Student's ratios of the resampled curves."""
        low, high = np.quantile(ratios, [(1 - self.level) / 2, (1 + self.level) / 2])
        return float(estimate - high * error), float(estimate - low * error)


def linear_intervals(fit: LeastSquares, d: Array, bootstrap: BlockBootstrap) -> list[Interval]:
    """Return an interval for each coefficient of the fit to ``d``."""
    residuals = fit.residuals(d)
    phi = fit.phi(residuals)
    stderrs = fit.stderrs(residuals, phi)
    noise = bootstrap.noise(residuals, float(phi), fit.variance(residuals, phi))
    left, found = fit.residuals(noise), noise @ fit.inverse.T
    scale = np.maximum(1, stderrs / np.maximum(found.std(0), TINY))
    ratios = found / fit.stderrs(left, fit.phi(left)) * scale
    return list(map(bootstrap.interval, fit.inverse @ d, stderrs, ratios.T))


def power_interval(
    x: Array, d: Array, p: float, bounds: Interval, bootstrap: BlockBootstrap
) -> Interval:
    """Return an interval for p of d = a + b x^p, given its least-squares estimate ``p``.

    The ratio is that of ln p, so that both ends are positive.
    """
    columns = tangent(x, p)
    curved, linear = LeastSquares.on(columns), LeastSquares.on(columns[:, :2])
    residuals = linear.residuals(d)
    phi = curved.phi(residuals)
    stderr = curved.stderrs(residuals, phi)[2]
    noise = bootstrap.noise(residuals, float(phi), curved.variance(residuals, phi))
    scale = max(1.0, stderr / (noise @ curved.inverse[2]).std())
    error = stderr / (abs((linear.inverse @ d)[1]) * p)
    if not (np.isfinite(error) and error > 0):
        return bounds
    low, high = np.log(bounds)
    reach = REACH * error
    grid = np.linspace(max(low, np.log(p) - reach), min(high, np.log(p) + reach), STEPS)
    ratios = scale * _power_ratios(x, d - residuals, noise, np.log(p), grid, curved)
    low, high = bootstrap.interval(np.log(p), float(error), ratios)
    return max(bounds[0], float(np.exp(low))), min(bounds[1], float(np.exp(high)))


def _power_ratios(
    x: Array, curve: Array, noise: Array, truth: float, grid: Array, fit: LeastSquares
) -> Array:
    """Return Student's ratio of ln p for each of ``curve + noise``, by a search over the grid.

    ``fit``, that of the measured curve, estimates the correlation of all of them.
    """
    columns = np.stack([tangent(x, p) for p in np.exp(grid)])
    linear, curved = LeastSquares.on_each(columns[..., :2]), LeastSquares.on_each(columns)
    misfits = np.stack([line.residuals(curve) for line in linear])  # of the curve, at another p
    bases = np.concatenate([line.basis for line in linear], axis=1)
    fitted = ((noise @ bases) ** 2).reshape(len(noise), len(grid), 2).sum(-1)
    squares = (misfits**2).sum(1) + 2 * noise @ misfits.T + (noise**2).sum(1)[:, None] - fitted
    best = squares.argmin(1)
    inner = np.clip(best, 1, len(grid) - 2)
    rows = np.arange(len(noise))
    before, at, after = (squares[rows, inner + k] for k in (-1, 0, 1))
    bend = before - 2 * at + after
    parabolic = (best == inner) & (bend > 1e-9 * at)  # else take the grid point itself
    shift = np.where(parabolic, (before - after) / np.where(parabolic, 2 * bend, 1), best - inner)
    found = grid[inner] + shift * (grid[1] - grid[0])
    ratios = np.empty(len(noise))
    for g in np.unique(best):
        chosen = best == g
        left = misfits[g] + linear[g].residuals(noise[chosen])
        slopes = (curve + noise[chosen]) @ linear[g].inverse[1]
        errors = curved[g].stderrs(left, fit.phi(left))[:, 2]
        ratios[chosen] = (found[chosen] - truth) * np.abs(slopes) * np.exp(grid[g]) / errors
    return ratios


def tangent(x: Array, p: float) -> Array:
    """Return the columns 1, x^p and x^p ln x: the derivatives of a + b x^p, the last over b."""
    log_x = np.log(np.where(x > 0, x, 1.0))
    return np.stack([np.ones_like(x), x**p, x**p * log_x], axis=1)


def lag_sums(rows: Array) -> Array:
    """Return the sums of products of each row's values at every lag; lags above 0 count twice.

    >>> lag_sums(np.array([[1.0, 2.0, 3.0]])).round(6).tolist()
    [[14.0, 16.0, 6.0]]
    """
    n = rows.shape[-1]
    spectrum = np.abs(np.fft.rfft(rows, 2 * n)) ** 2
    sums = np.fft.irfft(spectrum, 2 * n)[..., :n]
    sums[..., 1:] *= 2
    return np.asarray(sums)
