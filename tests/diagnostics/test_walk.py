"""Random walks on rough and flat potentials, against exact distributions and known laws."""

import pytest
import torch

from ghostbatch.diagnostics import fit_diffusion
from ghostbatch.diagnostics.walk import random_walk, right_probabilities
from ghostbatch.errors import InputError


def exact_distances(lines, doublings, roughness, reach):
    """Return distances and their errors at t = 1, 2, 4, ..., exact on each of ``lines`` potentials.

    The matrix of transition probabilities is squared again and again, so only the choice of
    potentials is random. Walkers turn back at ``reach``.
    """
    draw = torch.Generator().manual_seed(0)
    heights = roughness * torch.randn(lines, 2 * reach + 1, generator=draw).cumsum(1).double()
    right = right_probabilities(heights)
    matrix = torch.diag_embed(right[:, :-1], 1) + torch.diag_embed(1 - right[:, 1:], -1)
    squares = torch.arange(-reach, reach + 1, dtype=torch.float64) ** 2
    found = {}
    for doubling in range(doublings + 1):
        means = matrix[:, reach] @ squares
        distance = means.mean().item() ** 0.5
        found[2**doubling] = distance, means.std().item() / lines**0.5 / (2 * distance)
        matrix = matrix @ matrix
    return found


def test_on_a_flat_potential_the_mean_square_is_the_number_of_steps():
    walk = random_walk("flat", walkers=4000, steps=500)
    for t, distance, error in zip(walk.times, walk.distances, walk.stderrs, strict=True):
        assert abs(distance - t**0.5) <= 4 * error
    exact = exact_distances(lines=2, doublings=8, roughness=0, reach=300)
    assert [distance for distance, _ in exact.values()] == pytest.approx(
        [2 ** (k / 2) for k in range(9)]
    )


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
    exact = exact_distances(lines=400, doublings=8, roughness=roughness, reach=50)
    assert len(exact.keys() & set(walk.times)) >= 4
    for t, distance, error in zip(walk.times, walk.distances, walk.stderrs, strict=True):
        if t in exact:
            expected, exact_error = exact[t]
            assert abs(distance - expected) <= 4 * (error**2 + exact_error**2) ** 0.5


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
