"""The test of the plateau, against scipy and closed forms."""

import numpy as np
import pytest

from ghostbatch.diagnostics.plateau import find_plateau, student_quantile
from ghostbatch.errors import InputError

stats = pytest.importorskip("scipy.stats")


@pytest.mark.parametrize("freedom", [1, 2, 3, 10, 100])
@pytest.mark.parametrize("level", [0.5, 0.9, 0.95, 0.99])
def test_the_quantile_is_that_of_students_t(level, freedom):
    assert student_quantile(freedom, level) == pytest.approx(
        stats.t.ppf((1 + level) / 2, freedom), rel=1e-5
    )


def test_the_slope_of_one_curve_and_its_interval_are_those_of_linear_regression():
    draw = np.random.default_rng(0)
    times = np.linspace(0, 100, 41)
    values = 60 + 0.1 * times + draw.normal(size=41)
    near = (times >= 40) & (times <= 80)
    right = stats.linregress(times[near], values[near])
    reach = stats.t.ppf(0.975, near.sum() - 2) * right.stderr
    found = find_plateau([(times, values)], drop=80)
    assert found.slope == pytest.approx(right.slope)
    assert found.slope_interval == pytest.approx(
        (right.slope - reach, right.slope + reach), rel=1e-5
    )
    assert found.gain == pytest.approx(values[-1] - (right.intercept + 80 * right.slope))
    assert np.isnan(found.gain_interval).all()


def test_curves_at_different_levels_share_one_slope_and_have_an_interval_of_the_gain():
    times = list(range(11))
    curves = [
        (times, [level + 2 * t if t <= 8 else level + 16 + gain for t in times])
        for level, gain in ((0, 3), (50, 4), (20, 8))
    ]
    found = find_plateau(curves, drop=8)
    assert found.slope == pytest.approx(2)
    assert found.slope_interval == pytest.approx((2, 2))
    assert not found.is_flat
    assert found.gain == pytest.approx(5)
    reach = stats.t.ppf(0.975, 2) * np.std([3, 4, 8], ddof=1) / np.sqrt(3)
    assert found.gain_interval == pytest.approx((5 - reach, 5 + reach), rel=1e-5)


def test_the_gain_is_that_of_the_next_phase_only():
    times = [0, 2, 4, 6, 8, 10, 12, 14]
    values = [0, 1, 1, 1, 1, 5, 6, 100]
    assert find_plateau([(times, values)], drop=8, end=12).gain == pytest.approx(5)
    assert find_plateau([(times, values)], drop=8).gain == pytest.approx(99)
    with pytest.raises(InputError, match=r"^drop: there is no phase after 8; "):
        find_plateau([(times, values)], drop=8, end=9)


@pytest.mark.parametrize("level", [0.8, 0.95])
def test_the_interval_covers_the_true_slope_as_often_as_it_says(level):
    draw = np.random.default_rng(1)
    times = np.arange(13.0)
    covered = 0
    for _ in range(1000):
        curves = [(times, 70 + 0.5 * times + draw.normal(size=13)) for _ in range(2)]
        low, high = find_plateau(curves, drop=10, level=level).slope_interval
        covered += low <= 0.5 <= high
    assert covered / 1000 == pytest.approx(level, abs=4 * np.sqrt(level * (1 - level) / 1000))


def test_a_curve_without_values_in_the_last_half_is_refused_among_others():
    whole, sparse = ([4, 5, 6, 7, 8, 10], [1, 2, 1, 2, 3, 9]), ([0, 1, 10], [1, 2, 3])
    with pytest.raises(InputError, match=r"^curves: too few values in the last half"):
        find_plateau([whole, sparse], drop=8)
    with pytest.raises(InputError, match=r"^level: 95 is not between 0 and 1"):
        find_plateau([whole], drop=8, level=95)


@pytest.mark.parametrize(
    ("curve", "drop", "problem"),
    [
        (([1, 2, 3], [1, 2]), 2, "curves: times and values differ in number"),
        (([1, 2, 3], [1, 2, 3]), 3, "drop: there is no phase after 3"),
        (([], []), 3, "drop: there is no phase after 3"),
        (([0, 2, 3], [1, 2, 3]), 2, "curves: too few values in the last half"),
        (([0, 3, 4], [1, 2, 3]), 2, "curves: too few values in the last half"),
    ],
)
def test_curves_without_a_plateau_or_a_drop_are_refused(curve, drop, problem):
    with pytest.raises(InputError, match=f"^{problem}"):
        find_plateau([curve], drop=drop)
