"""Logistic regression on separable data: w(t) = w_hat log t + O(1).

w_hat is the hard-margin vector of a support vector machine without intercept: the shortest w with
z.w >= 1 for all z = y x. The loss has no minimum, so the weights grow for ever. Their direction
approaches that of w_hat, and the gap between their margin and the largest one shrinks as 1 / log t
(Soudry et al., *The implicit bias of gradient descent on separable data*, 2018).

The limit of gap x ln t is known. w_hat = |w_hat|^2 sum p_n z_n over the support vectors, with
weights p_n > 0 that sum to 1. Put w = w_hat ln t + r into dw/dt = lr sum exp(-z_n.w) z_n: then
lr exp(-z_n.r) = |w_hat|^2 p_n, so z_n.w = ln t + c + ln(1 / p_n) with c = ln(lr / |w_hat|^2). The
smallest is that of the largest p_n, and |w| = |w_hat| (ln t + c + H(p)) + O(1 / ln t), with H the
entropy. Hence

    gap x ln t -> (H(p) - ln(1 / p_max)) / |w_hat|,

with errors of order 1 / ln t and t^-s, where z.w_hat = 1 + s of the sample nearest to being a
support vector.
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
    """In steps at the rate that `descend` begins with."""
    weights: tuple[tuple[float, ...], ...]
    margins: tuple[float, ...]
    """Smallest y x.w / |w| over the samples, at each time."""

    @property
    def distances(self) -> tuple[float, ...]:
        """Length of w at each time."""
        return tuple(float(np.linalg.norm(w)) for w in self.weights)

    def gaps(self, largest: float) -> Array:
        """Return ``largest``, the largest possible margin 1 / |w_hat|, minus the margins."""
        return largest - np.array(self.margins)


def descend(
    inputs: ArrayLike, labels: ArrayLike, *, until: float = 1e12, constant: bool = False
) -> Descent:
    """Run gradient descent on the sum of log(1 + exp(-y x.w)), from 0.

    The first rate is a tenth of 1 over the largest curvature. The curvature falls with the loss, so
    the rate rises as L(0) / L(w), and time is counted in steps at the first rate.

    Args:
        inputs: samples (N, features); there is no intercept unless a feature is always 1.
        labels: -1 or 1, separable by a plane through the origin.
        until: the time to reach.
        constant: keep the first rate: slow, and equal to first order in the rate.

    >>> found = descend([[1.0, 0.0], [3.0, 1.0], [3.0, -1.0]], [1, 1, 1])
    >>> (np.array(found.weights[-1]) / np.log(found.times[-1])).round(1).tolist()
    [0.8, 0.0]
    >>> round(found.margins[-1], 2)
    1.0

    """
    x, y = np.asarray(inputs, dtype=float), np.asarray(labels, dtype=float)
    if x.ndim != 2 or y.shape != x.shape[:1] or not np.isin(y, (-1, 1)).all():
        raise InputError("labels", f"{y.shape} for {x.shape}", "give -1 or 1 for every sample")
    if not 10 <= until <= 1e200:
        raise InputError("until", f"{until} is not between 10 and 1e200", "use 1e12")
    signed = x * y[:, None]
    initial = len(y) * np.log(2)
    rate = 0.1 / (initial * (signed**2).sum(1).max())
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
    return Descent(times, weights, margins)


@dataclass(frozen=True)
class HardMargin:
    """The hard-margin vector of separable data, and its dual weights."""

    vector: Array
    """w_hat: the shortest w with z.w >= 1 for all samples z = y x."""
    weights: Array
    """p, one per sample: w_hat is |w_hat|^2 times their sum of the z; 0 off the support vectors."""
    slack: float
    """Smallest z.w_hat - 1 over the samples that are no support vectors; infinity if all are."""

    @property
    def largest(self) -> float:
        """The largest possible margin, 1 / |w_hat|."""
        return float(1 / np.linalg.norm(self.vector))

    @property
    def gap_limit(self) -> float:
        """The limit of gap times ln t: (H(p) - ln(1 / p_max)) / |w_hat|."""
        p = self.weights[self.weights > 0]
        return float(np.log(p.max()) - p @ np.log(p)) * self.largest


def hard_margin_in_the_plane(signed: ArrayLike) -> HardMargin:
    """Return the hard-margin vector of points z = y x, (N, 2), and its dual weights.

    It is q / |q|^2, where q is the point of the convex hull nearest to 0. In the plane q lies on a
    segment between two points, so this function tries all pairs.

    >>> found = hard_margin_in_the_plane([[1.0, 1.0], [1.0, -3.0], [3.0, 0.0]])
    >>> found.vector.tolist(), found.weights.tolist(), found.slack
    ([1.0, 0.0], [0.75, 0.25, 0.0], 2.0)
    """
    z = np.asarray(signed, dtype=float)
    ends = z[None] - z[:, None]
    lengths = np.maximum((ends**2).sum(-1), np.finfo(float).tiny)
    along = np.clip(-(z[:, None] * ends).sum(-1) / lengths, 0, 1)
    points = z[:, None] + along[..., None] * ends
    first, second = np.unravel_index((points**2).sum(-1).argmin(), lengths.shape)
    weights = np.zeros(len(z))
    weights[first] += 1 - along[first, second]
    weights[second] += along[first, second]
    nearest = weights @ z
    vector = nearest / (nearest**2).sum()
    slack = (z @ vector - 1)[weights == 0].min(initial=np.inf)
    return HardMargin(vector, weights, float(slack))
