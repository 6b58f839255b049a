"""Confidence intervals for least-squares fits whose residuals are autocorrelated.

A curve is recorded along one run, so its residuals are correlated, and standard errors that assume
independence are too small. Here the residuals are e_i = phi e_(i-1) + u_i. Blocks of consecutive
innovations u are resampled, which keeps dependence that phi misses; the curves made from them are
fitted again, and the interval is that of Student's ratio (estimate - truth) / error over these
curves (Davison and Hinkley, *Bootstrap Methods and their Application*, 1997, ch. 8: a
post-blackened block bootstrap, studentised). Three corrections matter for a few dozen points.

1. A fit lowers the lag-1 correlation of its residuals. phi is the correlation of the errors that
   gives, on average, the correlation found in the residuals.
2. The variance is the sum of squares over n - tr(H R), with H the projection of the fit and
   R_ij = phi^|i-j|; for phi = 0 that is the usual n - k.
3. Residuals are orthogonal to the fitted columns, so resampled blocks change a coefficient too
   little. If its standard deviation over the resamples is below the one that phi implies, the
   ratios are scaled up to match.
"""

from dataclasses import dataclass

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
        parts = zip(inverses, bases, fitted, lag_sums(inverses), strict=True)
        return [cls(*each) for each in parts]

    def residuals(self, curves: Array) -> Array:
        """Return the residuals of each curve (..., n)."""
        return np.asarray(curves - (curves @ self.basis) @ self.basis.T)

    def stderrs(self, squares: Array, phi: Array) -> Array:
        """Return standard errors (..., k), given sums of squared residuals and correlations."""
        powers = phi[..., None] ** np.arange(len(self.fitted_by_lag))
        freedom = np.maximum(len(self.fitted_by_lag) - powers @ self.fitted_by_lag, 0.5)
        variances = (squares / freedom)[..., None] * (powers @ self.variance_by_lag.T)
        return np.asarray(np.sqrt(np.maximum(variances, TINY)))

    def deviations(self, phi: float, variance: float) -> Array:
        """Return the standard deviations of the coefficients, for errors of known variance."""
        powers = phi ** np.arange(len(self.fitted_by_lag))
        return np.asarray(np.sqrt(variance * (self.variance_by_lag @ powers)))


class AR1Estimator:
    """Estimates phi from the residuals of a fit, corrected for the bias of fitting."""

    def __init__(self, fit: LeastSquares) -> None:
        n = len(fit.basis)
        lags = np.abs(np.subtract.outer(np.arange(n), np.arange(n))).ravel()
        projection = np.eye(n) - fit.basis @ fit.basis.T
        products = projection[:, :-1] @ projection[1:]  # of neighbours, as a quadratic form
        powers = PHIS[:, None] ** np.arange(n)
        neighbours, squares = (
            powers @ np.bincount(lags, m.ravel()) for m in (products, projection)
        )
        self._expected = np.maximum.accumulate(neighbours / squares)
        """Lag-1 correlation of the residuals, for each of `PHIS`."""

    def phi(self, residuals: Array) -> Array:
        """Return the correlation of neighbouring errors, for residuals (..., n)."""
        found = (residuals[..., 1:] * residuals[..., :-1]).sum(-1)
        found = found / np.maximum((residuals**2).sum(-1), TINY)
        return np.asarray(np.interp(found, self._expected, PHIS))


@dataclass(frozen=True)
class BlockBootstrap:
    """Draws ``resamples`` curves of noise that resembles given residuals."""

    resamples: int
    seed: int

    def noise(self, residuals: Array, phi: float, variance: float) -> Array:
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


def linear_intervals(
    fit: LeastSquares, d: Array, level: float, bootstrap: BlockBootstrap
) -> list[Interval]:
    """Return an interval for each coefficient of the fit to ``d``."""
    residuals, ar1 = fit.residuals(d), AR1Estimator(fit)
    phi, variance = _noise_level(fit, ar1, residuals)
    noise = bootstrap.noise(residuals, phi, variance)
    left = fit.residuals(noise)
    errors = fit.stderrs((left**2).sum(-1), ar1.phi(left))
    found = noise @ fit.inverse.T
    scale = fit.deviations(phi, variance) / np.maximum(found.std(0), TINY)
    ratios = found / errors * np.maximum(1, scale)
    stderrs = fit.stderrs((residuals**2).sum(), ar1.phi(residuals))
    return [
        _interval(estimate, error, ratio, level)
        for estimate, error, ratio in zip(fit.inverse @ d, stderrs, ratios.T, strict=True)
    ]


def power_interval(
    x: Array, d: Array, p: float, bounds: Interval, level: float, bootstrap: BlockBootstrap
) -> Interval:
    """Return an interval for p of d = a + b x^p, given its least-squares estimate ``p``.

    The ratio is that of ln p, so that both ends are positive.
    """
    curved = LeastSquares.on(tangent(x, p))
    linear = LeastSquares.on(tangent(x, p)[:, :2])
    residuals, ar1 = linear.residuals(d), AR1Estimator(curved)
    phi, variance = _noise_level(curved, ar1, residuals)
    noise = bootstrap.noise(residuals, phi, variance)
    scale = max(1.0, curved.deviations(phi, variance)[2] / (noise @ curved.inverse[2]).std())
    slope = (linear.inverse @ d)[1]
    error = curved.stderrs((residuals**2).sum(), ar1.phi(residuals))[2] / (abs(slope) * p)
    if not (np.isfinite(error) and error > 0):
        return bounds
    low, high = np.log(bounds)
    reach = REACH * error
    grid = np.linspace(max(low, np.log(p) - reach), min(high, np.log(p) + reach), STEPS)
    ratios = scale * _power_ratios(x, d - residuals, noise, np.log(p), grid, ar1)
    low, high = _interval(np.log(p), float(error), ratios, level)
    return max(bounds[0], float(np.exp(low))), min(bounds[1], float(np.exp(high)))


def _power_ratios(
    x: Array, curve: Array, noise: Array, truth: float, grid: Array, ar1: AR1Estimator
) -> Array:
    """Return Student's ratio of ln p for each of ``curve + noise``, by a search over the grid."""
    columns = np.stack([tangent(x, p) for p in np.exp(grid)])
    linear, curved = LeastSquares.on_each(columns[..., :2]), LeastSquares.on_each(columns)
    misfits = np.stack([fit.residuals(curve) for fit in linear])  # of the curve, at another p
    bases = np.concatenate([fit.basis for fit in linear], axis=1)
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
        errors = curved[g].stderrs((left**2).sum(-1), ar1.phi(left))[:, 2]
        ratios[chosen] = (found[chosen] - truth) * np.abs(slopes) * np.exp(grid[g]) / errors
    return ratios


def _noise_level(fit: LeastSquares, ar1: AR1Estimator, residuals: Array) -> tuple[float, float]:
    """Return the correlation phi and the variance of the errors."""
    phi = float(ar1.phi(residuals))
    fitted = phi ** np.arange(len(residuals)) @ fit.fitted_by_lag
    return phi, float((residuals**2).sum() / max(len(residuals) - fitted, 0.5))


def tangent(x: Array, p: float) -> Array:
    """Return the columns 1, x^p and x^p ln x: the derivatives of a + b x^p, the last over b."""
    log_x = np.log(np.where(x > 0, x, 1.0))
    return np.stack([np.ones_like(x), x**p, x**p * log_x], axis=1)


def _interval(estimate: float, error: float, ratios: Array, level: float) -> Interval:
    """Return the studentised interval at ``level``."""
    low, high = np.quantile(ratios, [(1 - level) / 2, (1 + level) / 2])
    return float(estimate - high * error), float(estimate - low * error)


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
