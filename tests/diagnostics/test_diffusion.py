"""The diffusion fit on planted curves, against numpy's own fit and Monte Carlo."""

from dataclasses import FrozenInstanceError
from math import inf, nan

import numpy as np
import pytest

from ghostbatch.diagnostics import fit_diffusion, log_spaced
from ghostbatch.errors import InputError

T = np.array(log_spaced(20_000, per_decade=12), dtype=float)
ESTIMATES = ("slope", "intercept", "exponent", "alpha")


def curve(law="log", noise=0.0, seed=0, power=1.0):
    shape = np.sqrt(T) / 10 if law == "sqrt" else np.log(T) ** power
    return 0.7 + 1.3 * shape + noise * np.random.default_rng(seed).standard_normal(len(T))


def test_a_planted_logarithm_is_recovered_exactly():
    fit = fit_diffusion(T, curve())
    assert (fit.slope, fit.intercept) == pytest.approx((1.3, 0.7), rel=1e-9)
    assert (fit.exponent, fit.alpha) == pytest.approx((1, 2), rel=1e-6)
    assert max(getattr(fit, f"{name}_stderr") for name in ESTIMATES) < 1e-6
    assert fit.better == "log"


@pytest.mark.parametrize("power", [0.5, 1, 2, 3.5])
def test_a_planted_power_of_the_logarithm_gives_the_exponent_and_alpha(power):
    fit = fit_diffusion(T, curve(power=power))
    assert (fit.exponent, fit.alpha) == pytest.approx((power, 2 / power), rel=1e-5)


@pytest.mark.parametrize("seed", range(5))
def test_noisy_curves_are_recovered_within_four_standard_errors(seed):
    fit = fit_diffusion(T, curve(noise=0.1, seed=seed))
    for name, truth in zip(ESTIMATES, (1.3, 0.7, 1, 2), strict=True):
        assert abs(getattr(fit, name) - truth) < 4 * getattr(fit, f"{name}_stderr")
        assert 0 < getattr(fit, f"{name}_stderr") < 0.1 * truth


@pytest.mark.parametrize("power", [1.0, 2.0])
def test_standard_errors_agree_with_the_spread_over_many_runs(power):
    fits = [fit_diffusion(T, curve(noise=0.1, seed=seed, power=power)) for seed in range(150)]
    # A straight line does not fit (ln t)^2: there the errors of slope and intercept mean nothing.
    for name in ESTIMATES if power == 1 else ESTIMATES[2:]:
        spread = np.std([getattr(fit, name) for fit in fits], ddof=1)
        claimed = np.mean([getattr(fit, f"{name}_stderr") for fit in fits])
        assert claimed == pytest.approx(spread, rel=0.25)


@pytest.mark.parametrize("law", ["log", "sqrt"])
def test_the_line_its_errors_and_the_aic_margin_are_those_numpy_finds(law):
    d = curve(law, noise=0.5)
    fit = fit_diffusion(T, d)
    (slope, intercept), covariance = np.polyfit(np.log(T), d, 1, cov=True)
    assert (fit.slope, fit.intercept) == pytest.approx((slope, intercept), rel=1e-9)
    assert (fit.slope_stderr, fit.intercept_stderr) == pytest.approx(
        np.sqrt(np.diag(covariance)), rel=1e-9
    )
    squares = [np.polyfit(x, d, 1, full=True)[1][0] for x in (np.log(T), np.sqrt(T))]
    aic_log, aic_sqrt = (len(T) * np.log(rss / len(T)) + 2 * 2 for rss in squares)
    assert fit.better == law
    assert fit.aic_margin == pytest.approx(abs(aic_sqrt - aic_log), rel=1e-9)
    assert fit.aic_margin > 10


def test_an_exact_square_root_is_better_as_a_square_root():
    assert fit_diffusion(T, curve("sqrt")).better == "sqrt"


def test_the_result_is_frozen():
    with pytest.raises(FrozenInstanceError):
        fit_diffusion(T, curve()).slope = 0.0


@pytest.mark.parametrize(
    ("updates", "distances"),
    [
        ([1, 2, 3], [1, 2, 3]),
        ([1, 2, 3, 4, 5], [1, 2, 3, 4]),
        ([[1, 2], [3, 4]], [[1, 2], [3, 4]]),
        ([0, 1, 2, 3], [1, 2, 3, 4]),
        ([0.5, 1, 2, 3], [1, 2, 3, 4]),
        ([1, 2, nan, 4], [1, 2, 3, 4]),
        ([1, 2, 3, inf], [1, 2, 3, 4]),
        ([1, 2, 3, 4], [1, 2, nan, 4]),
    ],
)
def test_bad_input_is_refused_by_name(updates, distances):
    with pytest.raises(InputError, match=r"^updates: ") as raised:
        fit_diffusion(updates, distances)
    assert raised.value.field == "updates"
