"""Logistic regression on separable data: w(t) = w_hat log t + O(1), an ultra-slow walk for ever.

w_hat is the hard-margin vector of a support vector machine without intercept: the shortest w with
y x.w >= 1 for all samples. The loss has no minimum, so gradient descent never stops; its direction
approaches that of w_hat, and the gap of its margin to the largest one shrinks as 1 / log t (Soudry
et al., *The implicit bias of gradient descent on separable data*, 2018).
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ghostbatch.errors import InputError

Array = NDArray[np.float64]

PER_DECADE = 5
"""Times that are kept per factor of ten."""


@dataclass(frozen=True)
class Descent:
    """Where gradient descent from 0 was at some times, evenly spaced in log time."""

    times: tuple[float, ...]
    """In steps of the constant rate ``lr``."""
    weights: tuple[tuple[float, ...], ...]
    margins: tuple[float, ...]
    """Smallest y x.w / |w| over the samples."""
    lr: float

    @property
    def distances(self) -> tuple[float, ...]:
        """Lengths of w: how far it has walked."""
        return tuple(float(np.linalg.norm(w)) for w in self.weights)

    def over_log(self) -> Array:
        """w(t) / log t (times, features), which approaches the hard-margin vector."""
        return np.array(self.weights) / np.log(self.times)[:, None]

    def gaps(self, largest: float) -> Array:
        """How much the margins fall short of the largest possible one, which is 1 / |w_hat|."""
        return largest - np.array(self.margins)


def descend(
    inputs: ArrayLike,
    labels: ArrayLike,
    *,
    until: float = 1e12,
    lr: float | None = None,
    constant: bool = False,
) -> Descent:
    """Gradient descent on the sum of log(1 + exp(-y x.w)), from 0, to a time beyond counting.

    The curvature falls with the loss, so the rate may rise as the loss falls: a step at w stands
    for L(0) / L(w) steps at the rate ``lr``, and time is counted in those. With ``constant`` they
    are done one by one, which is the same to first order in the rate, and slow.

    Args:
        inputs: samples (N, features); there is no intercept unless a feature is 1 throughout.
        labels: -1 or 1; a half-space must hold all y x, or there is no margin.
        until: the time to reach.
        lr: rate at the beginning; a tenth of 1 over the largest curvature if None.
        constant: keep the rate.

    >>> found = descend([[1.0, 0.0], [3.0, 1.0], [3.0, -1.0]], [1, 1, 1])
    >>> found.over_log()[-1].round(1).tolist(), round(found.margins[-1], 2)
    ([0.8, 0.0], 1.0)

    """
    x, y = np.asarray(inputs, dtype=float), np.asarray(labels, dtype=float)
    if x.ndim != 2 or y.shape != x.shape[:1] or not np.isin(y, (-1, 1)).all():
        raise InputError("labels", f"{y.shape} for {x.shape}", "give -1 or 1 for every sample")
    if not 10 <= until <= 1e200:
        raise InputError("until", f"{until} is not between 10 and 1e200", "use 1e12")
    signed = x * y[:, None]
    first = len(y) * np.log(2)
    rate = lr if lr is not None else 0.1 / (first * (signed**2).sum(1).max())
    w, t = np.zeros(x.shape[1]), 0.0
    kept: list[tuple[float, Array]] = []
    due = 10.0
    while t < until:
        rises = np.logaddexp(0, -(signed @ w))  # each sample's loss
        pace = 1.0 if constant else first / rises.sum()
        w = w + rate * pace * -np.expm1(-rises) @ signed
        t += pace
        if t >= due:
            kept.append((t, w))
            due = max(due, t) * 10 ** (1 / PER_DECADE)
        if t > 1e4 and rises.max() > np.log(2):  # in all that time a margin would have shown
            raise InputError("labels", "no half-space holds all y x", "use separable data")
    margins = tuple(float((signed @ w).min() / np.linalg.norm(w)) for _, w in kept)
    times, weights = zip(*((t, tuple(w.tolist())) for t, w in kept), strict=True)
    return Descent(times, weights, margins, float(rate))
