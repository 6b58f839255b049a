"""Random walks on rough and flat potentials, against exact distributions and known laws."""

import numpy as np
import pytest
import torch

from ghostbatch.diagnostics import fit_diffusion
from ghostbatch.diagnostics.walk import exact_walk, random_walk, right_probabilities
from ghostbatch.errors import InputError


def test_on_a_flat_potential_the_mean_square_is_the_number_of_steps():
    walk = random_walk("flat", walkers=4000, steps=500)
    for t, distance, error in zip(walk.times, walk.distances, walk.stderrs, strict=True):
        assert abs(distance - t**0.5) <= 4 * error
    exact = exact_walk("flat", lines=2, doublings=8, reach=300)
    assert exact.distances == pytest.approx([2 ** (k / 2) for k in range(9)])


def test_on_a_flat_potential_the_square_root_fits_better():
    walk = random_walk("flat", walkers=3000, steps=5000)
    fit = fit_diffusion(walk.times, walk.distances)
    assert fit.better == "sqrt"
    assert fit.verdict.startswith("ordinary")


def test_on_a_brownian_potential_the_distance_is_the_square_of_the_logarithm():
    """Sinai's law: alpha = 1, and the exponent is 2 / alpha."""
    walk = random_walk(walkers=2000, steps=20_000)
    fit = fit_diffusion(walk.times, walk.distances)
    low, high = fit.exponent_interval
    assert low < 2 < high
    assert 1.6 < fit.exponent < 2.4
    assert fit.aic["power"] < min(fit.aic["log"], fit.aic["sqrt"])


@pytest.mark.parametrize("roughness", [0.5, 1.0, 2.0])
def test_simulated_distances_match_the_exact_ones(roughness):
    walk = random_walk(walkers=4000, steps=256, roughness=roughness)
    exact = exact_walk(lines=400, doublings=8, roughness=roughness, reach=50)
    found, expected = by_time(walk), by_time(exact)
    common = found.keys() & expected.keys()
    assert len(common) >= 4
    for t in common:
        (distance, error), (exact_distance, exact_error) = found[t], expected[t]
        assert abs(distance - exact_distance) <= 4 * (error**2 + exact_error**2) ** 0.5


def by_time(walk):
    return dict(zip(walk.times, zip(walk.distances, walk.stderrs, strict=True), strict=True))


def test_steps_are_in_detailed_balance():
    """Crossings of an edge are equally frequent in both directions."""
    heights = torch.randn(3, 9, dtype=torch.float64).cumsum(1)
    right = right_probabilities(heights)
    edges = torch.exp(-heights[:, 1:] - heights[:, :-1])
    weight = torch.zeros_like(heights)
    weight[:, 1:] += edges
    weight[:, :-1] += edges
    torch.testing.assert_close((weight * right)[:, :-1], edges)
    torch.testing.assert_close((weight * (1 - right))[:, 1:], edges)


def test_the_seed_determines_the_walk():
    assert random_walk(walkers=50, steps=300) == random_walk(walkers=50, steps=300)
    assert random_walk(walkers=50, steps=300) != random_walk(walkers=50, steps=300, seed=1)


def test_walkers_get_less_far_on_rougher_potentials():
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
    ids=["unknown potential", "one walker", "no steps", "roughness 0"],
)
def test_bad_input_is_refused_by_name(field, options):
    with pytest.raises(InputError) as raised:
        random_walk(**options)
    assert raised.value.field == field
