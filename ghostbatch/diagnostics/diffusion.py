"""Fits that tell whether the distance grows as log t (ultra-slow) or as sqrt t (ordinary)."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, isfinite, sqrt
from typing import Literal

import numpy as np

from ghostbatch.diagnostics.bootstrap import (
    TINY,
    Array,
    BlockBootstrap,
    Interval,
    LeastSquares,
    linear_intervals,
    power_interval,
    tangent,
)
from ghostbatch.errors import InputError, check_is

LOWEST, HIGHEST = 0.05, 10.0
"""Range in which the exponent is searched."""

MOST_POINTS = 500
"""With more points a fit uses every k-th: its time grows with the cube of their number."""

DECIDED = 4.0
"""Margin of AIC, for the effective samples, below which two models are commonly both tenable."""


@dataclass(frozen=True)
class DiffusionFit:
    """Least-squares fits of distance d against update t.

    Standard errors assume independent residuals. Intervals do not: see
    `ghostbatch.diagnostics.bootstrap`. If `autocorrelated`, trust the intervals.
    """

    slope: float
    """b of d = a + b ln t."""
    slope_stderr: float
    slope_interval: Interval
    intercept: float
    """a of d = a + b ln t."""
    intercept_stderr: float
    intercept_interval: Interval
    exponent: float
    """p of d = a + b (ln t)^p; its error is infinite if the data do not determine it."""
    exponent_stderr: float
    exponent_interval: Interval
    alpha: float
    """2 / p, the exponent of the random potential in the theory."""
    alpha_stderr: float
    alpha_interval: Interval
    better: Literal["log", "sqrt"]
    """Which of d = a + b ln t and d = a + b sqrt t has the lower AIC."""
    aic_margin: float
    """Difference of the two AICs, for independent residuals; above 10 the other is ruled out."""
    aic: dict[str, float]
    """n ln(RSS / n) + 2 k of "log" and "sqrt" (k = 2) and of "power", a + b (ln t)^p (k = 3)."""
    samples: int
    autocorrelation: float
    """Of neighbouring residuals of the model with the lowest AIC, corrected for bias."""
    level: float
    """Share of the intervals that are to cover the truth."""

    @property
    def autocorrelated(self) -> bool:
        """Whether `autocorrelation` is above 1.645 / sqrt(n), a one-sided test at 5 %."""
        return self.autocorrelation > 1.645 / sqrt(self.samples)

    @property
    def effective_samples(self) -> float:
        """Number of independent samples with as much information: n (1 - phi) / (1 + phi)."""
        return self.samples * (1 - self.autocorrelation) / (1 + self.autocorrelation)

    @property
    def finding(self) -> str:
        """Which law the distance follows, if that is decided.

        Margins of AIC are those of the effective samples.
        """
        share = self.effective_samples / self.samples
        margin = self.aic_margin * share
        curved = (self.aic[self.better] - self.aic["power"]) * share
        other = "sqrt" if self.better == "log" else "log"
        if curved > DECIDED:
            return f"neither log t nor sqrt t: (ln t)^p fits better by {curved:.0f} of AIC"
        if margin < DECIDED:
            return f"undecided: {self.better} t is ahead of {other} t by {margin:.1f} of AIC only"
        kind = "ultra-slow" if self.better == "log" else "ordinary"
        return f"{kind}: {self.better} t fits better than {other} t by {margin:.0f} of AIC"

    @property
    def verdict(self) -> str:
        """The result in one line: the finding, slope and exponent."""
        effective = f", effectively {self.effective_samples:.0f}" if self.autocorrelated else ""
        return (
            f"{self.finding}; slope {self.slope:.4g} in {_show(self.slope_interval)}, exponent "
            f"{self.exponent:.3g} in {_show(self.exponent_interval)} at {100 * self.level:g} % "
            f"({self.samples} samples{effective})"
        )


def fit_diffusion(
    updates: Sequence[float],
    distances: Sequence[float],
    *,
    level: float = 0.95,
    resamples: int = 999,
    seed: int = 0,
) -> DiffusionFit:
    """Fit the growth of the weight distance before the first drop of the learning rate.

    Of more than `MOST_POINTS` points every k-th in order of time is used, with the smallest k that
    leaves no more; `DiffusionFit.samples` counts those. Give points at equal steps of time: the
    intervals assume AR(1) errors, and are too narrow for points at equal steps of log t.

    Args:
        updates: numbers of updates done, from 1 on, up to the first drop.
        distances: the distance from the initial weights after each of them.
        level: share of the intervals that are to cover the truth.
        resamples: number of bootstrap curves; with 0 the intervals are unbounded.
        seed: seeds the bootstrap; the same input gives the same intervals.

    >>> t = np.arange(1, 200)
    >>> fit = fit_diffusion(t, 2 + 3 * np.log(t) + 0.1 * np.cos(t))
    >>> fit.slope_interval[0] < 3 < fit.slope_interval[1], fit.verdict[:41]
    (True, 'ultra-slow: log t fits better than sqrt t')

    """
    t, d = _sorted_by_time(updates, distances)
    check_is("level", level, float, "a number between 0 and 1")
    if not (0 < level < 1 and (resamples >= 99 or resamples == 0)):
        raise InputError("level", f"{level} of {resamples} resamples", "use 0.95 of 999")
    log_t, bootstrap = np.log(t), BlockBootstrap(resamples, seed, level)
    exponent = _best_exponent(log_t, d)
    models = {"log": log_t, "sqrt": np.sqrt(t), "power": log_t**exponent}
    lines = {name: _line(x, d) for name, x in models.items()}
    aic = {
        name: len(d) * float(np.log(squares / len(d))) + 2 * (3 if name == "power" else 2)
        for name, (_, squares) in lines.items()
    }
    (intercept, slope), squares = lines["log"]
    intercept_err, slope_err = _stderrs(_columns(log_t), squares)
    exponent_err = inf  # unless the data determine it
    if LOWEST < exponent < HIGHEST:
        (_, b), squares = lines["power"]
        exponent_err = _stderrs(tangent(log_t, exponent) * [1, 1, b], squares)[2]
    best = min(aic, key=aic.__getitem__)
    fits = {name: LeastSquares.on(_columns(x)) for name, x in models.items()}
    curved = LeastSquares.on(tangent(log_t, exponent)) if best == "power" else fits[best]
    intercept_interval = slope_interval = -inf, inf
    low, high = 0.0, inf
    if resamples:
        intercept_interval, slope_interval = linear_intervals(fits["log"], d, bootstrap)
    if resamples and isfinite(exponent_err):
        low, high = power_interval(log_t, d, exponent, (LOWEST, HIGHEST), bootstrap)
    return DiffusionFit(
        slope=slope,
        slope_stderr=slope_err,
        slope_interval=slope_interval,
        intercept=intercept,
        intercept_stderr=intercept_err,
        intercept_interval=intercept_interval,
        exponent=exponent,
        exponent_stderr=exponent_err,
        exponent_interval=(low, high),
        alpha=2 / exponent,
        alpha_stderr=2 * exponent_err / exponent**2,
        alpha_interval=(2 / high, 2 / low if low else inf),
        better="log" if aic["log"] <= aic["sqrt"] else "sqrt",
        aic_margin=abs(aic["sqrt"] - aic["log"]),
        aic=aic,
        samples=len(t),
        autocorrelation=float(curved.phi(fits[best].residuals(d))),
        level=level,
    )


def slope_and_exponent(updates: Sequence[float], distances: Sequence[float]) -> tuple[float, float]:
    """Return `DiffusionFit.slope` and `.exponent` alone, in a fiftieth of the time.

    >>> t = np.arange(1, 100)
    >>> slope, exponent = slope_and_exponent(t, 2 + 3 * np.log(t))
    >>> round(slope, 6), round(exponent, 6)
    (3.0, 1.0)
    """
    t, d = _sorted_by_time(updates, distances)
    (_, slope), _ = _line(np.log(t), d)
    return slope, _best_exponent(np.log(t), d)


def _sorted_by_time(updates: Sequence[float], distances: Sequence[float]) -> tuple[Array, Array]:
    """Return at most `MOST_POINTS` of both in order of time: residuals are correlated in time."""
    t, d = _numbers("updates", updates), _numbers("distances", distances)
    if t.shape != d.shape or t.ndim != 1:
        raise InputError("updates", f"{t.shape} against {d.shape}", "give one distance for each")
    if not (np.isfinite(t).all() and (t >= 1).all()):
        raise InputError("updates", "not all finite and at least 1", "leave the others out")
    if not np.isfinite(d).all():
        raise InputError("distances", "not all finite", "leave the others out")
    order = np.argsort(t, kind="stable")[:: max(1, -(-len(t) // MOST_POINTS))]
    t, d = t[order], d[order]
    if len(np.unique(t)) < 4:
        raise InputError("updates", "fewer than 4 different values", "record more")
    return t, d


def _numbers(field: str, values: Sequence[float]) -> Array:
    try:
        return np.asarray(values, dtype=float)
    except (TypeError, ValueError):
        raise InputError(field, "not all are numbers", "leave the others out") from None


def _columns(x: Array) -> Array:
    return np.stack([np.ones_like(x), x], axis=1)


def _show(interval: Interval) -> str:
    return f"[{interval[0]:.3g}, {interval[1]:.3g}]"


def _line(x: Array, d: Array) -> tuple[list[float], float]:
    """Return a and b of d = a + b x by least squares, and the sum of squared residuals."""
    columns = _columns(x)
    coefficients = np.linalg.lstsq(columns, d, rcond=None)[0]
    # A perfect fit has no residual; the floor keeps its logarithm finite.
    floor = len(d) * (np.finfo(float).eps * np.abs(d).max()) ** 2 + TINY
    squares = max(float(((d - columns @ coefficients) ** 2).sum()), float(floor))
    return coefficients.tolist(), squares


def _stderrs(jacobian: Array, squares: float) -> list[float]:
    """Return the standard errors of a fit, given its derivatives and sum of squared residuals."""
    variance = squares / max(1, len(jacobian) - jacobian.shape[1])
    covariance = variance * np.linalg.pinv(jacobian.T @ jacobian)
    return np.sqrt(np.maximum(np.diag(covariance), 0)).tolist()  # type: ignore[no-any-return]


def _best_exponent(log_t: Array, d: Array) -> float:
    """Return p of d = a + b (ln t)^p; for each p the rest is linear."""
    low, high = LOWEST, HIGHEST
    centred = d - d.mean()
    for _ in range(40):  # each grid spans two steps of the one before
        grid = np.linspace(low, high, 21)
        x = log_t ** grid[:, None]
        x -= x.mean(-1, keepdims=True)
        slope = (x @ centred) / np.maximum((x**2).sum(-1), TINY)
        best = int(np.argmin(((centred - slope[:, None] * x) ** 2).sum(-1)))
        low, high = grid[max(0, best - 1)], grid[min(20, best + 1)]
        if high - low < 1e-9:
            break
    return float(grid[best])
