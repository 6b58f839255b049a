"""The diffusion fit on simulated curves, against numpy's fit and Monte Carlo."""

import tracemalloc
from dataclasses import FrozenInstanceError, replace
from math import inf, nan

import numpy as np
import pytest

from ghostbatch.diagnostics import fit_diffusion, log_spaced
from ghostbatch.diagnostics.bootstrap import LeastSquares
from ghostbatch.errors import InputError

T = np.array(log_spaced(20_000, per_decade=12), dtype=float)
ESTIMATES = ("slope", "intercept", "exponent", "alpha")


def curve(law="log", noise=0.0, seed=0, power=1.0):
    shape = np.sqrt(T) / 10 if law == "sqrt" else np.log(T) ** power
    return 0.7 + 1.3 * shape + noise * np.random.default_rng(seed).standard_normal(len(T))


def test_an_exact_logarithm_is_recovered_exactly():
    fit = fit_diffusion(T, curve())
    assert (fit.slope, fit.intercept) == pytest.approx((1.3, 0.7), rel=1e-9)
    assert (fit.exponent, fit.alpha) == pytest.approx((1, 2), rel=1e-6)
    assert max(getattr(fit, f"{name}_stderr") for name in ESTIMATES) < 1e-6
    assert fit.better == "log"


@pytest.mark.parametrize("power", [0.5, 1, 2, 3.5])
def test_an_exact_power_of_the_logarithm_gives_the_exponent_and_alpha(power):
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
    fits = [fit_diffusion(T, curve(noise=0.1, seed=seed, power=power)) for seed in range(100)]
    # A straight line does not fit (ln t)^2, so its slope and intercept are not checked there.
    for name in ESTIMATES if power == 1 else ESTIMATES[2:]:
        spread = np.std([getattr(fit, name) for fit in fits], ddof=1)
        claimed = np.mean([getattr(fit, f"{name}_stderr") for fit in fits])
        assert claimed == pytest.approx(spread, rel=0.25)


@pytest.mark.parametrize("law", ["log", "sqrt"])
def test_the_line_its_errors_and_the_aic_of_each_model_match_numpy(law):
    d = curve(law, noise=0.5)
    fit = fit_diffusion(T, d)
    (slope, intercept), covariance = np.polyfit(np.log(T), d, 1, cov=True)
    assert (fit.slope, fit.intercept) == pytest.approx((slope, intercept), rel=1e-9)
    assert (fit.slope_stderr, fit.intercept_stderr) == pytest.approx(
        np.sqrt(np.diag(covariance)), rel=1e-9
    )
    columns = {"log": np.log(T), "sqrt": np.sqrt(T), "power": np.log(T) ** fit.exponent}
    for name, x in columns.items():
        rss = np.polyfit(x, d, 1, full=True)[1][0]
        count = 3 if name == "power" else 2
        assert fit.aic[name] == pytest.approx(len(T) * np.log(rss / len(T)) + 2 * count, rel=1e-9)
    assert fit.aic["power"] <= fit.aic["log"] + 2  # a special case of it
    assert fit.better == law
    assert fit.aic_margin == abs(fit.aic["sqrt"] - fit.aic["log"])
    assert fit.aic_margin > 10


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
    ids=[
        "three updates",
        "unequal lengths",
        "two dimensions",
        "update 0",
        "update below 1",
        "update NaN",
        "update infinite",
        "distance NaN",
    ],
)
def test_bad_input_is_refused_by_name(updates, distances):
    with pytest.raises(InputError) as raised:
        fit_diffusion(updates, distances)
    wrong = "updates" if np.isfinite(distances).all() else "distances"
    assert raised.value.field == wrong


def ar1_noise(phi, seed):
    """AR(1) noise of variance 1."""
    noise = np.random.default_rng(seed).standard_normal(len(T))
    for i in range(1, len(T)):
        noise[i] = phi * noise[i - 1] + np.sqrt(1 - phi**2) * noise[i]
    return noise


@pytest.mark.parametrize("phi", [0.0, 0.6])
@pytest.mark.parametrize("power", [1.0, 2.0])
def test_intervals_cover_the_truth_at_the_stated_rate(power, phi):
    """Of 120 intervals at 90 %, 108 are expected to; the binomial deviation is 3.3."""
    curves = [curve(power=power) + 0.1 * ar1_noise(phi, seed) for seed in range(120)]
    fits = [fit_diffusion(T, d, level=0.9, resamples=299) for d in curves]
    truths = {"slope": 1.3, "intercept": 0.7, "exponent": power, "alpha": 2 / power}
    for name, truth in truths.items():
        if power == 1 or name in ("exponent", "alpha"):  # a straight line does not fit (ln t)^2
            bounds = [getattr(fit, f"{name}_interval") for fit in fits]
            covered = sum(low < truth < high for low, high in bounds)
            assert abs(covered - 108) < 3 * 3.3, name
    if power == 1 and phi:  # standard errors for independent residuals are too small here
        naive = sum(abs(fit.slope - 1.3) < 1.645 * fit.slope_stderr for fit in fits)
        assert naive < 80


def fits_with_noise(phi):
    curves = [curve() + 0.1 * ar1_noise(phi, seed) for seed in range(60)]
    return [fit_diffusion(T, d, resamples=99) for d in curves]


def test_autocorrelated_residuals_are_recognised():
    fits = fits_with_noise(phi=0.6)
    assert sum(fit.autocorrelated for fit in fits) > 55
    assert np.mean([fit.autocorrelation for fit in fits]) == pytest.approx(0.6, abs=0.08)
    effective = np.mean([fit.effective_samples for fit in fits])
    assert 0.25 * len(T) / 2 < effective < 0.25 * len(T) * 2


def test_independent_residuals_are_rarely_called_autocorrelated():
    """In 5 % of 60 fits, with a binomial deviation of 1.7."""
    assert sum(fit.autocorrelated for fit in fits_with_noise(phi=0.0)) < 3 + 3 * 1.7


def test_phi_and_the_errors_are_nearly_unbiased_where_plain_residuals_are_not():
    line = LeastSquares.on(np.stack([np.ones_like(T), np.log(T)], axis=1))
    noise = np.stack([ar1_noise(0.7, seed) for seed in range(2000)])
    left = line.residuals(noise)
    phi = line.phi(left).mean()
    plain = ((left[:, 1:] * left[:, :-1]).sum(1) / (left**2).sum(1)).mean()
    assert abs(phi - 0.7) < 0.04
    assert plain < 0.62
    errors = np.sqrt((line.stderrs(left, np.full(2000, 0.7)) ** 2).mean(0))
    assert errors == pytest.approx((noise @ line.inverse.T).std(0), rel=0.05)
    assert line.variance(left, np.full(2000, 0.7)).mean() == pytest.approx(1, rel=0.05)


@pytest.mark.parametrize(
    ("d", "words"),
    [
        (curve(noise=0.1), "ultra-slow: log t fits better than sqrt t by "),
        (curve("sqrt", noise=0.1), "ordinary: sqrt t fits better than log t by "),
        (curve(power=2, noise=0.1), "neither log t nor sqrt t: (ln t)^p fits better by "),
        (curve(noise=40, seed=1), "undecided: "),
        (curve() + ar1_noise(0.9, 0), "effectively "),
    ],
    ids=["log", "sqrt", "neither", "undecided", "autocorrelated"],
)
def test_the_verdict_is_one_line_that_says_which_law_holds(d, words):
    verdict = fit_diffusion(T, d).verdict
    assert words in verdict
    assert "\n" not in verdict
    assert "at 95 %" in verdict


def test_without_resamples_only_the_intervals_are_missing():
    fit, full = (fit_diffusion(T, curve(noise=0.1), resamples=count) for count in (0, 99))
    assert fit.slope_interval == fit.intercept_interval == (-inf, inf)
    assert fit.exponent_interval == fit.alpha_interval == (0, inf)
    intervals = {name: value for name, value in vars(full).items() if name.endswith("_interval")}
    assert replace(fit, **intervals) == full


def test_a_level_above_one_is_refused():
    with pytest.raises(InputError, match=r"^level: "):
        fit_diffusion(T, curve(), level=95)


@pytest.mark.parametrize("distance", [0.0, 3.0])
def test_a_constant_distance_has_a_slope_of_zero_and_no_verdict(distance):
    fit = fit_diffusion(T, np.full(len(T), distance))
    assert fit.slope == pytest.approx(0, abs=1e-12)
    assert fit.slope_interval == pytest.approx((0, 0), abs=1e-12)
    assert "undecided" in fit.verdict


@pytest.mark.slow
@pytest.mark.parametrize("phi", [0.0, 0.3, 0.6, 0.8])
@pytest.mark.parametrize("power", [1.0, 2.0])
def test_intervals_at_95_percent_cover_the_truth_in_92_to_98_percent(power, phi):
    """Of 500 curves: the binomial deviation is 1 %."""
    fits = [
        fit_diffusion(T, curve(power=power) + 0.1 * ar1_noise(phi, seed), seed=seed)
        for seed in range(500)
    ]
    truths = {"slope": 1.3, "intercept": 0.7, "exponent": power}
    for name, truth in truths.items() if power == 1 else [("exponent", power)]:
        bounds = [getattr(fit, f"{name}_interval") for fit in fits]
        assert 0.92 < np.mean([low < truth < high for low, high in bounds]) < 0.98, name


def many_points(count, phi=0.0, runs=1):
    """Return 1 ... count, and curves with AR(1) noise of deviation 0.1 at every one of them."""
    t = np.arange(1.0, count + 1)
    noise = np.random.default_rng(0).standard_normal((count, runs))
    for i in range(1, count):
        noise[i] = phi * noise[i - 1] + np.sqrt(1 - phi**2) * noise[i]
    return t, 0.7 + 1.3 * np.log(t) + 0.1 * noise.T


@pytest.mark.parametrize("phi", [0.6, 0.9])
def test_intervals_cover_the_truth_when_many_points_are_thinned(phi, monkeypatch):
    """Of 60 intervals at 90 %, 54 are expected to; the binomial deviation is 2.3.

    Points at equal steps of log t cover the slope in 46 (phi 0.6) and 40 (phi 0.9) of 60.
    """
    monkeypatch.setattr("ghostbatch.diagnostics.diffusion.MOST_POINTS", 125)
    t, curves = many_points(2000, phi, runs=60)
    fits = [fit_diffusion(t, d, level=0.9, resamples=199) for d in curves]
    for name, truth in {"slope": 1.3, "intercept": 0.7, "exponent": 1.0}.items():
        bounds = [getattr(fit, f"{name}_interval") for fit in fits]
        assert sum(low < truth < high for low, high in bounds) > 54 - 3 * 2.3, name


def test_above_500_points_every_kth_is_used_and_below_all_are():
    t, (d,) = many_points(1001)
    assert fit_diffusion(t[:500], d[:500]).samples == 500
    assert fit_diffusion(t, d) == fit_diffusion(t[::3], d[::3])
    order = np.random.default_rng(1).permutation(len(t))
    assert fit_diffusion(t[order], d[order]) == fit_diffusion(t, d)


def test_a_million_points_take_seconds_and_little_memory():
    t = np.arange(1.0, 1_000_001)
    d = 0.7 + 1.3 * np.log(t) + 0.1 * np.cos(np.arange(1_000_000) ** 2 % 1000)
    tracemalloc.start()
    try:
        fit = fit_diffusion(t, d)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert fit.slope == pytest.approx(1.3, abs=0.1)
    assert peak < 200 * 2**20
