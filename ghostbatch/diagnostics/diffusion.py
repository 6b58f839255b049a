"""Does the distance from the start grow like log t (ultra-slow) or like sqrt t (ordinary)?"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ghostbatch.errors import InputError

Array = NDArray[np.float64]

LOWEST, HIGHEST = 0.05, 10.0
"""Exponents that are tried."""


@dataclass(frozen=True)
class DiffusionFit:
    """Least-squares fits of distance d against update t; errors assume independent residuals."""

    slope: float
    """b of d = a + b ln t."""
    slope_stderr: float
    intercept: float
    """a of d = a + b ln t."""
    intercept_stderr: float
    exponent: float
    """p of d = a + b (ln t)^p; its error is infinite where the data do not determine it."""
    exponent_stderr: float
    alpha: float
    """2 / p, the exponent of the random potential in the theory."""
    alpha_stderr: float
    better: Literal["log", "sqrt"]
    """Which of d = a + b ln t and d = a + b sqrt t has the lower AIC."""
    aic_margin: float
    """By how much; above 10 the other is out of the question."""


def fit_diffusion(updates: Sequence[float], distances: Sequence[float]) -> DiffusionFit:
    """Fit the growth of the weight distance over the first, high-rate phase of a run.

    Args:
        updates: numbers of updates done, from 1 on; leave out what follows the first drop.
        distances: the distance from the initial weights after each.

    """
    t, d = np.asarray(updates, dtype=float), np.asarray(distances, dtype=float)
    if t.shape != d.shape or t.ndim != 1:
        raise InputError("updates", f"{t.shape} against {d.shape}", "give as many of both")
    if len(np.unique(t)) < 4:
        raise InputError("updates", "fewer than 4 different ones", "record more of them")
    if not (np.isfinite(t).all() and np.isfinite(d).all() and (t >= 1).all()):
        raise InputError("updates", "not all finite and from 1 on", "leave the others out")

    log_t = np.log(t)
    (intercept, slope), (intercept_err, slope_err), log_error = _least_squares(log_t, d)
    *_, sqrt_error = _least_squares(np.sqrt(t), d)
    margin = len(t) * float(np.log(sqrt_error / log_error))  # both models have two parameters
    exponent, exponent_err = _fit_exponent(log_t, d)
    return DiffusionFit(
        slope=slope,
        slope_stderr=slope_err,
        intercept=intercept,
        intercept_stderr=intercept_err,
        exponent=exponent,
        exponent_stderr=exponent_err,
        alpha=2 / exponent,
        alpha_stderr=2 * exponent_err / exponent**2,
        better="log" if margin >= 0 else "sqrt",
        aic_margin=abs(margin),
    )


def _least_squares(x: Array, d: Array) -> tuple[tuple[float, float], tuple[float, float], float]:
    """Coefficients of d = a + b x, their standard errors, and the sum of squared residuals."""
    design = np.stack([np.ones_like(x), x], axis=1)
    (a, b), error, covariance = _solve(design, d, parameters=2)
    a_err, b_err = np.sqrt(np.diag(covariance))
    return (float(a), float(b)), (float(a_err), float(b_err)), error


def _solve(design: Array, d: Array, parameters: int) -> tuple[Array, float, Array]:
    coefficients = np.linalg.lstsq(design, d, rcond=None)[0].astype(float)
    # A perfect fit has no residual; the floor keeps its logarithm finite.
    floor = len(d) * (np.finfo(float).eps * np.abs(d).max()) ** 2 + np.finfo(float).tiny
    error = max(float(((d - design @ coefficients) ** 2).sum()), float(floor))
    variance = error / max(1, len(d) - parameters)
    return coefficients, error, variance * np.linalg.pinv(design.T @ design).astype(float)


def _fit_exponent(log_t: Array, d: Array) -> tuple[float, float]:
    """P of d = a + b (ln t)^p: for each p the rest is linear, so only p is searched."""
    low, high = LOWEST, HIGHEST
    for _ in range(40):  # a grid that closes in on the minimum
        grid = np.linspace(low, high, 21)
        best = int(np.argmin([_least_squares(log_t**p, d)[2] for p in grid]))
        low, high = grid[max(0, best - 1)], grid[min(20, best + 1)]
        if high - low < 1e-9:
            break
    p = float(grid[best])
    if not LOWEST < p < HIGHEST:
        return p, float("inf")  # the data do not determine it
    _, b = _least_squares(log_t**p, d)[0]
    log_log = np.log(np.where(log_t > 0, log_t, 1.0))
    jacobian = np.stack([np.ones_like(log_t), log_t**p, b * log_t**p * log_log], axis=1)
    residual = d - jacobian[:, :2] @ np.array(_least_squares(log_t**p, d)[0])
    variance = float((residual**2).sum()) / max(1, len(d) - 3)
    covariance = variance * np.linalg.pinv(jacobian.T @ jacobian)
    return p, float(np.sqrt(covariance[2, 2]))
