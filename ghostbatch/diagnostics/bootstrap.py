"""Intervals for least squares whose residuals remember the ones before.

A curve is recorded along one run, so its residuals are correlated, and errors that take them for
independent are too small. Here the residuals are e_i = phi e_(i-1) + u_i. What is resampled is
blocks of consecutive innovations u, which keeps whatever dependence phi misses; curves made from
them are fitted again, and the interval is that of Student's ratio (estimate - truth) / error over
these curves (Davison and Hinkley, *Bootstrap Methods and their Application*, 1997, ch. 8: a
post-blackened block bootstrap, studentised). Three corrections matter on some dozens of points.
phi is the one whose *residuals*, after the fit has taken its share, have on average the lag-1
correlation that was found. The variance is the sum of squares over n - tr(H R), with H the
projection of the fit and R_ij = phi^|i-j|; for phi = 0 that is the usual n - k. And since residuals
have nothing left of what was fitted, blocks of them move a coefficient too little: where they move
it less than phi says, the ratios are stretched to that.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Interval = tuple[float, float]

PHIS = np.linspace(0.0, 0.98, 50)
"""Correlations that are considered; negative ones count as none, which errs on the safe side."""

TINY = float(np.finfo(float).tiny)
"""Instead of 0, where a perfect fit would be divided by its residuals."""

REACH, STEPS = 8.0, 65
"""A curved parameter is searched in so many steps, over so many standard errors either way."""


@dataclass(frozen=True)
class Line:
    """Least squares on fixed columns (n, k), and what correlated errors do to its coefficients."""

    inverse: Array
    basis: Array
    taken: Array
    """Times phi^lag, summed: tr(H R), what the fit takes of the sum of squares."""
    spread: Array
    """Times phi^lag, summed: the variance of each coefficient, for errors of variance 1."""

    @classmethod
    def on(cls, columns: Array) -> "Line":
        """The fit on some columns."""
        return cls.on_each(columns[None])[0]

    @classmethod
    def on_each(cls, columns: Array) -> list["Line"]:
        """Many fits (fits, n, k) at once."""
        inverses = np.linalg.pinv(columns).astype(float)
        bases = np.linalg.qr(columns)[0].astype(float)
        taken = lag_sums(bases.swapaxes(-1, -2)).sum(-2)
        parts = zip(inverses, bases, taken, lag_sums(inverses), strict=True)
        return [cls(*each) for each in parts]

    def residuals(self, curves: Array) -> Array:
        """What a fit leaves of each curve (..., n)."""
        return np.asarray(curves - (curves @ self.basis) @ self.basis.T)

    def errors(self, squares: Array, phi: Array) -> Array:
        """Standard errors (..., k) of the coefficients, from sums of squares and correlations."""
        powers = phi[..., None] ** np.arange(len(self.taken))
        freedom = np.maximum(len(self.taken) - powers @ self.taken, 0.5)
        variances = (squares / freedom)[..., None] * (powers @ self.spread.T)
        return np.asarray(np.sqrt(np.maximum(variances, TINY)))

    def expected(self, phi: float, variance: float) -> Array:
        """Standard deviations of the coefficients over errors of that correlation and variance."""
        powers = phi ** np.arange(len(self.taken))
        return np.asarray(np.sqrt(variance * (self.spread @ powers)))


class AR1Estimator:
    """Reads phi off the residuals of a fit, whose own lag-1 correlation is lower on average."""

    def __init__(self, line: Line) -> None:
        n = len(line.basis)
        lags = np.abs(np.subtract.outer(np.arange(n), np.arange(n))).ravel()
        left = np.eye(n) - line.basis @ line.basis.T
        products = left[:, :-1] @ left[1:]  # of neighbours, as a quadratic form in the errors
        powers = PHIS[:, None] ** np.arange(n)
        neighbours, squares = (powers @ np.bincount(lags, m.ravel()) for m in (products, left))
        expected = neighbours / squares
        self._expected = np.maximum.accumulate(expected)

    def phi(self, residuals: Array) -> Array:
        """The correlation of neighbouring errors, for residuals (..., n)."""
        found = (residuals[..., 1:] * residuals[..., :-1]).sum(-1)
        found = found / np.maximum((residuals**2).sum(-1), TINY)
        return np.asarray(np.interp(found, self._expected, PHIS))


@dataclass(frozen=True)
class Blocks:
    """Curves like the one that was fitted."""

    resamples: int
    seed: int

    def noise(self, residuals: Array, phi: float, variance: float) -> Array:
        """New residuals (resamples, n): blocks of about n^(1/3) innovations, coloured by phi."""
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
        noise[:, 0] /= np.sqrt(1 - phi**2)  # as if it had gone on for ever before
        for i in range(1, n):
            noise[:, i] += phi * noise[:, i - 1]
        return np.asarray(noise)


def line_intervals(line: Line, d: Array, level: float, blocks: Blocks) -> list[Interval]:
    """Intervals for the coefficients of a straight fit."""
    residuals, memory = line.residuals(d), AR1Estimator(line)
    phi, variance = _noise_level(line, memory, residuals)
    noise = blocks.noise(residuals, phi, variance)
    left = line.residuals(noise)
    errors = line.errors((left**2).sum(-1), memory.phi(left))
    found = noise @ line.inverse.T
    short = line.expected(phi, variance) / np.maximum(found.std(0), TINY)
    ratios = found / errors * np.maximum(1, short)
    own = line.errors((residuals**2).sum(), memory.phi(residuals))
    return [
        _interval(estimate, error, ratio, level)
        for estimate, error, ratio in zip(line.inverse @ d, own, ratios.T, strict=True)
    ]


def power_interval(
    x: Array, d: Array, p: float, bounds: Interval, level: float, blocks: Blocks
) -> Interval:
    """An interval for p of d = a + b x^p, whose least-squares estimate is ``p``.

    The ratio is taken of ln p, so that the interval is one of positive numbers.
    """
    here = Line.on(tangent(x, p))
    straight = Line.on(tangent(x, p)[:, :2])
    residuals, memory = straight.residuals(d), AR1Estimator(here)
    phi, variance = _noise_level(here, memory, residuals)
    noise = blocks.noise(residuals, phi, variance)
    short = max(1.0, here.expected(phi, variance)[2] / (noise @ here.inverse[2]).std())
    slope = (straight.inverse @ d)[1]
    own = here.errors((residuals**2).sum(), memory.phi(residuals))[2] / (abs(slope) * p)
    if not (np.isfinite(own) and own > 0):
        return bounds
    low, high = np.log(bounds)
    grid = np.linspace(max(low, np.log(p) - REACH * own), min(high, np.log(p) + REACH * own), STEPS)
    ratios = short * _power_ratios(x, d - residuals, noise, np.log(p), grid, memory)
    low, high = _interval(np.log(p), float(own), ratios, level)
    return max(bounds[0], float(np.exp(low))), min(bounds[1], float(np.exp(high)))


def _power_ratios(
    x: Array, curve: Array, noise: Array, truth: float, grid: Array, memory: AR1Estimator
) -> Array:
    """Student's ratios of ln p over the curves ``curve + noise``, by a search over the grid."""
    columns = np.stack([tangent(x, p) for p in np.exp(grid)])
    lines, tangents = Line.on_each(columns[..., :2]), Line.on_each(columns)
    missed = np.stack([line.residuals(curve) for line in lines])  # what another p misses
    bases = np.concatenate([line.basis for line in lines], axis=1)
    shares = ((noise @ bases) ** 2).reshape(len(noise), len(grid), 2).sum(-1)
    squares = (missed**2).sum(1) + 2 * noise @ missed.T + (noise**2).sum(1)[:, None] - shares
    best = squares.argmin(1)
    inner = np.clip(best, 1, len(grid) - 2)
    rows = np.arange(len(noise))
    before, at, after = (squares[rows, inner + k] for k in (-1, 0, 1))
    bend = before - 2 * at + after
    curved = (best == inner) & (bend > 1e-9 * at)  # else the grid is as near as one gets
    shift = np.where(curved, (before - after) / np.where(curved, 2 * bend, 1), best - inner)
    found = grid[inner] + shift * (grid[1] - grid[0])
    ratios = np.empty(len(noise))
    for g in np.unique(best):
        mine = best == g
        left = missed[g] + lines[g].residuals(noise[mine])
        slopes = (curve + noise[mine]) @ lines[g].inverse[1]
        errors = tangents[g].errors((left**2).sum(-1), memory.phi(left))[:, 2]
        ratios[mine] = (found[mine] - truth) * np.abs(slopes) * np.exp(grid[g]) / errors
    return ratios


def _noise_level(line: Line, memory: AR1Estimator, residuals: Array) -> tuple[float, float]:
    """Correlation and variance of the errors."""
    phi = float(memory.phi(residuals))
    taken = phi ** np.arange(len(residuals)) @ line.taken
    return phi, float((residuals**2).sum() / max(len(residuals) - taken, 0.5))


def tangent(x: Array, p: float) -> Array:
    """Columns of d = a + b x^p near p: 1, x^p, and the change with p over b."""
    log_x = np.log(np.where(x > 0, x, 1.0))
    return np.stack([np.ones_like(x), x**p, x**p * log_x], axis=1)


def _interval(estimate: float, error: float, ratios: Array, level: float) -> Interval:
    low, high = np.quantile(ratios, [(1 - level) / 2, (1 + level) / 2])
    return float(estimate - high * error), float(estimate - low * error)


def lag_sums(rows: Array) -> Array:
    """Sums of products of a row's values at each lag, twice for lags above 0.

    >>> lag_sums(np.array([[1.0, 2.0, 3.0]])).round(6).tolist()
    [[14.0, 16.0, 6.0]]
    """
    n = rows.shape[-1]
    spectrum = np.abs(np.fft.rfft(rows, 2 * n)) ** 2
    sums = np.fft.irfft(spectrum, 2 * n)[..., :n]
    sums[..., 1:] *= 2
    return np.asarray(sums)
