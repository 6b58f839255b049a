"""Gradient descent for logistic regression on separable data: w(t) = w_hat log t + O(1).

w_hat is the hard-margin vector of a support vector machine without intercept: the shortest w with
y x.w >= 1 for all samples. The loss has no minimum, so the weights grow for ever. Their direction
approaches that of w_hat, and the gap between their margin and the largest one shrinks as 1 / log t
(Soudry et al., *The implicit bias of gradient descent on separable data*, 2018).
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ghostbatch.errors import InputError

Array = NDArray[np.float64]

PER_DECADE = 5
"""Number of recorded times per factor of ten."""


@dataclass(frozen=True)
class Descent:
    """The weights of gradient descent from 0, at times evenly spaced in log time."""

    times: tuple[float, ...]
    """In steps at the constant rate ``lr``."""
    weights: tuple[tuple[float, ...], ...]
    margins: tuple[float, ...]
    """Smallest y x.w / |w| over the samples, at each time."""
    lr: float

    @property
    def distances(self) -> tuple[float, ...]:
        """Length of w at each time."""
        return tuple(float(np.linalg.norm(w)) for w in self.weights)

    def over_log(self) -> Array:
        """Return w(t) / log t, (times, features), which approaches the hard-margin vector."""
        return np.array(self.weights) / np.log(self.times)[:, None]

    def gaps(self, largest: float) -> Array:
        """Return ``largest``, the largest possible margin 1 / |w_hat|, minus the margins."""
        return largest - np.array(self.margins)


def descend(
    inputs: ArrayLike,
    labels: ArrayLike,
    *,
    until: float = 1e12,
    lr: float | None = None,
    constant: bool = False,
) -> Descent:
    """Run gradient descent on the sum of log(1 + exp(-y x.w)), from 0.

    The curvature falls with the loss, so the rate may rise: a step at w counts as L(0) / L(w) steps
    at the rate ``lr``, and time is counted in steps at that rate. With ``constant`` every
    step has the rate ``lr``: slow, and equal to first order in the rate.

    Args:
        inputs: samples (N, features); there is no intercept unless a feature is always 1.
        labels: -1 or 1, separable by a plane through the origin.
        until: the time to reach.
        lr: rate at w = 0; a tenth of 1 over the largest curvature if None.
        constant: keep the rate constant.

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
    initial = len(y) * np.log(2)
    rate = lr if lr is not None else 0.1 / (initial * (signed**2).sum(1).max())
    w, t = np.zeros(x.shape[1]), 0.0
    recorded: list[tuple[float, Array]] = []
    next_record = 10.0
    while t < until:
        losses = np.logaddexp(0, -(signed @ w))
        steps = 1.0 if constant else initial / losses.sum()
        w = w + rate * steps * -np.expm1(-losses) @ signed
        t += steps
        if t >= next_record:
            recorded.append((t, w))
            next_record = max(next_record, t) * 10 ** (1 / PER_DECADE)
        if t > 1e4 and losses.max() > np.log(2):  # a sample is still on the wrong side
            raise InputError("labels", "no plane through 0 separates them", "use separable data")
    margins = tuple(float((signed @ w).min() / np.linalg.norm(w)) for _, w in recorded)
    times, weights = zip(*((t, tuple(w.tolist())) for t, w in recorded), strict=True)
    return Descent(times, weights, margins, float(rate))
