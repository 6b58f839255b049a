"""An interval for the ratio of two means that says so when the divisor may be 0."""

from math import inf, isfinite, sqrt

import numpy as np
from numpy.typing import NDArray

from ghostbatch.diagnostics.plateau import student_quantile


def ratio_interval(blocks: NDArray[np.float64], level: float) -> tuple[float, float]:
    """Return Fieller's interval of the ratio of two means, y over x, which is 0 or more.

    It holds the ratios r for which Student's t cannot tell the mean of y - r x from 0. It has no
    upper end if the mean of x cannot be told from 0. It is (inf, inf) if that mean is below 0, so
    that no finite ratio agrees with the blocks, and (0, inf) for fewer than two blocks.

    Args:
        blocks: for each block, a count, and the sums of x and y over that count.
        level: probability of the interval.

    >>> blocks = np.array([[1, 9.0, 21.0], [1, 11.0, 19.0], [1, 10.0, 20.0]])
    >>> low, high = ratio_interval(blocks, 0.95)
    >>> round(low, 2), round(high, 2)
    (1.4, 2.99)

    """
    counts, sums = blocks[:, 0], blocks[:, 1:]
    if len(blocks) < 2:
        return 0.0, inf
    means = sums.sum(0) / counts.sum()
    left = (sums - counts[:, None] * means) / np.sqrt(counts)[:, None]
    covariance = left.T @ left / (len(blocks) - 1) / counts.sum()
    t = student_quantile(len(blocks) - 1, level)
    # The ratios are those with a r^2 - 2 b r + c <= 0.
    (a, b), (_, c) = (np.outer(means, means) - t**2 * covariance).tolist()
    root = sqrt(max(0.0, b**2 - a * c))
    if not isfinite(root):
        return 0.0, inf
    if a > 0:
        low, high = (b - root) / a, (b + root) / a
        return (max(0.0, low), high) if high >= 0 else (inf, inf)
    if c <= 0:
        return 0.0, inf
    return c / (b + root) if b + root > 0 else inf, inf
