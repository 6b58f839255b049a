"""Walkers on rough and flat lines, against exact distributions and the laws they are to show."""

import numpy as np
import pytest
import torch

from ghostbatch.diagnostics import fit_diffusion
from ghostbatch.diagnostics.walk import chances, exact_walk, random_walk
from ghostbatch.errors import InputError


def test_on_a_flat_line_the_mean_square_is_the_number_of_steps():
    walk = random_walk("flat", walkers=4000, steps=500)
    for t, distance, error in zip(walk.times, walk.distances, walk.stderrs, strict=True):
        assert abs(distance - t**0.5) <= 4 * error
    exact = exact_walk("flat", lines=2, doublings=8, reach=300)
    assert exact.distances == pytest.approx([2 ** (k / 2) for k in range(9)])


def test_on_a_flat_line_the_square_root_fits_better():
    fit = fit_diffusion(*fitted(random_walk("flat", walkers=3000, steps=5000)))
    assert fit.better == "sqrt"
    assert fit.verdict.startswith("ordinary")


def test_on_a_brownian_line_the_distance_is_the_square_of_the_logarithm():
    """Sinai's law: alpha = 1, and the exponent is 2 / alpha."""
    fit = fit_diffusion(*fitted(random_walk(walkers=2000, steps=20_000)))
    low, high = fit.exponent_interval
    assert low < 2 < high
    assert 1.6 < fit.exponent < 2.4
    assert fit.aic["power"] < min(fit.aic["log"], fit.aic["sqrt"])


def fitted(walk):
    return walk.times, walk.distances


@pytest.mark.parametrize("roughness", [0.5, 1.0, 2.0])
def test_walkers_are_where_the_exact_distribution_says(roughness):
    walk = random_walk(walkers=4000, steps=256, roughness=roughness)
    exact = exact_walk(lines=400, doublings=8, roughness=roughness, reach=50)
    expected = {t: (d, e) for t, d, e in zip(*parts(exact), strict=True)}
    compared = 0
    for t, distance, error in zip(*parts(walk), strict=True):
        if t in expected:
            there, its_error = expected[t]
            assert abs(distance - there) <= 4 * (error**2 + its_error**2) ** 0.5
            compared += 1
    assert compared >= 4


def parts(walk):
    return walk.times, walk.distances, walk.stderrs


def test_the_chances_keep_the_weight_of_every_place():
    """Detailed balance: crossings of an edge are as frequent either way."""
    heights = torch.randn(3, 9, dtype=torch.float64).cumsum(1)
    right = chances(heights)
    edges = torch.exp(-heights[:, 1:] - heights[:, :-1])
    weight = torch.zeros_like(heights)
    weight[:, 1:] += edges
    weight[:, :-1] += edges
    torch.testing.assert_close((weight * right)[:, :-1], edges)
    torch.testing.assert_close((weight * (1 - right))[:, 1:], edges)


def test_a_walk_is_repeated_by_its_seed():
    assert random_walk(walkers=50, steps=300) == random_walk(walkers=50, steps=300)
    assert random_walk(walkers=50, steps=300) != random_walk(walkers=50, steps=300, seed=1)


def test_rougher_lines_hold_walkers_back():
    ends = [
        random_walk(walkers=500, steps=3000, roughness=r).distances[-1] for r in (0.3, 1.0, 3.0)
    ]
    assert ends == sorted(ends, reverse=True)
    assert np.isfinite(ends).all()


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("potential", {"potential": "hilly"}),
        ("walkers", {"walkers": 1}),
        ("steps", {"steps": 0}),
        ("roughness", {"roughness": 0.0}),
    ],
)
def test_bad_input_is_refused_by_name(field, options):
    with pytest.raises(InputError) as raised:
        random_walk(**options)
    assert raised.value.field == field
