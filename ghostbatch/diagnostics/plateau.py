"""Whether a curve has become flat before the learning rate drops, and what the drop gains.

The paper: training longer at the high rate improves the final accuracy even while the validation
error is flat; the gain shows at the drop.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import nan, pi, sqrt

import numpy as np

from ghostbatch.errors import InputError

Curve = tuple[Sequence[float], Sequence[float]]
"""Times, and the values at these."""

ANGLES = 100_001
"""Points of the integral in `student_quantile`."""


@dataclass(frozen=True)
class Plateau:
    """The slope of some curves before a drop of the rate, and their gain at the drop."""

    slope: float
    """Change of the value per unit of time, over the last half of the first phase."""
    slope_interval: tuple[float, float]
    """Interval of Student's t; it assumes independent residuals about each curve's own line."""
    gain: float
    """Mean over the curves: the last value of the next phase minus the line's value at the drop."""
    gain_interval: tuple[float, float]
    """Interval of Student's t over the curves; not a number for a single curve."""

    @property
    def is_flat(self) -> bool:
        """Whether the interval of the slope holds 0, which a short or noisy curve also does."""
        low, high = self.slope_interval
        return low <= 0 <= high


def find_plateau(
    curves: Sequence[Curve], drop: float, end: float | None = None, level: float = 0.95
) -> Plateau:
    """Fit lines of one common slope to the last half of the first phase of each curve.

    Args:
        curves: one for each seed, such as validation accuracies by epoch.
        drop: the time of the first drop; the last half is from drop / 2 to drop.
        end: the time of the next drop; None is the end of the curves.
        level: probability of the intervals.

    >>> flat = [0, 2, 4, 6, 8, 10, 12], [0, 0, 70, 71, 69, 70, 80]
    >>> found = find_plateau([flat], drop=8)
    >>> found.slope, found.gain, found.is_flat
    (-0.25, 10.5, True)

    """
    pairs = [_checked(curve, drop, end) for curve in curves]
    halves = [(t[near], v[near]) for t, v in pairs for near in [(t >= drop / 2) & (t <= drop)]]
    freedom = sum(len(t) - 1 for t, _ in halves) - 1
    if freedom < 1 or not all(len(t) for t, _ in halves):
        raise InputError("curves", "too few values in the last half", "evaluate more often")
    times, values = (
        np.concatenate([half[k] - half[k].mean() for half in halves]) for k in range(2)
    )
    squares = float((times**2).sum())
    slope = float((times * values).sum()) / squares
    error = sqrt(float(((values - slope * times) ** 2).sum()) / freedom / squares)
    last = [v[-1] for _, v in pairs]
    lines = [v.mean() + slope * (drop - t.mean()) for t, v in halves]
    gains, count = np.array(last) - np.array(lines), len(pairs)
    gain = float(gains.mean())
    spread = float(gains.std(ddof=1)) / sqrt(count) if count > 1 else nan
    gain_interval = _interval(gain, spread, max(1, count - 1), level)
    return Plateau(slope, _interval(slope, error, freedom, level), gain, gain_interval)


def _checked(curve: Curve, drop: float, end: float | None) -> tuple[np.ndarray, np.ndarray]:
    """Return a curve up to ``end`` as arrays; refuse one without a value after the drop."""
    times, values = (np.asarray(part, dtype=float) for part in curve)
    if times.shape != values.shape or times.ndim != 1:
        raise InputError("curves", "times and values differ in number", "give one for each")
    if end is not None:
        times, values = times[times <= end], values[times <= end]
    if not (drop > 0 and len(times) and times[-1] > drop):
        problem = f"there is no phase after {drop:g}"
        raise InputError("drop", problem, "give the time of a drop within the curves")
    return times, values


def _interval(middle: float, error: float, freedom: int, level: float) -> tuple[float, float]:
    reach = student_quantile(freedom, level) * error
    return middle - reach, middle + reach


@cache
def student_quantile(freedom: int, level: float = 0.95) -> float:
    """Return q with P(-q < T < q) = level, for Student's T with ``freedom`` degrees of freedom.

    With t = sqrt(freedom) tan(angle) the density of the angle is cos(angle)^(freedom - 1).

    >>> round(student_quantile(2), 3), round(student_quantile(1000), 3)
    (4.303, 1.962)
    """
    if not 0 < level < 1:
        raise InputError("level", f"{level} is not between 0 and 1", "use 0.95")
    angles = np.linspace(0, pi / 2, ANGLES)
    density = np.cos(angles) ** (freedom - 1)
    areas = np.concatenate([[0.0], np.cumsum(density[1:] + density[:-1])])
    return sqrt(freedom) * float(np.tan(np.interp(level, areas / areas[-1], angles)))
