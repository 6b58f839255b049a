"""The factor on the rate, and the noise that can stand in for it."""

from math import floor, sqrt

import pytest
import torch

from ghostbatch.errors import InputError
from ghostbatch.optim import lr_scale, noise_weights, rate_batch, scale_adam, update_at


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize(
    ("batch", "base", "factors"),
    [(4096, 1024, (1, 2, 4)), (128, 128, (1, 1, 1)), (32, 128, (1, 0.5, 0.25))],
)
def test_the_factor_is_one_the_root_or_the_ratio(batch, base, factors):
    assert tuple(lr_scale(batch, base, rule) for rule in ("none", "sqrt", "linear")) == factors
    assert lr_scale(batch, base) == factors[1]


@pytest.mark.parametrize(
    ("arguments", "field"),
    [((0, 128), "batch"), ((128, -1), "base_batch"), ((128, 128, "cubic"), "lr_rule")],
)
def test_a_bad_size_or_rule_is_refused_by_name(arguments, field):
    with pytest.raises(InputError, match=f"^{field}: ") as raised:
        lr_scale(*arguments)
    assert raised.value.field == field


@pytest.mark.parametrize(("batch", "base"), [(4096, 128), (512, 128), (100, 7), (32, 128)])
@pytest.mark.parametrize("rule", ["none", "sqrt", "linear"])
def test_the_batch_that_holds_the_rate_is_the_base_batch_times_the_factor(batch, base, rule):
    found = rate_batch(batch, base, rule)
    assert float(found) == pytest.approx(base * lr_scale(batch, base, rule), rel=1e-15)
    assert found == {"none": base, "sqrt": found, "linear": batch}[rule]
    assert rate_batch(512, 128) == 256


def test_an_epoch_next_to_half_an_update_is_rounded_as_the_exact_root_has_it():
    """Solutions of a^2 - 2 b^2 = -1 lie below half an update, by less than a float can tell."""
    a, b = 1_855_077_841, 1_311_738_121
    samples, updates = 256 * a, (b - 1) // 2  # samples / sqrt(4096 * 128) = a / (2 sqrt(2)) < b / 2
    assert a**2 - 2 * b**2 == -1
    assert update_at(1, samples, rate_batch(4096, 128)) == updates
    assert floor(samples / sqrt(4096 * 128) + 0.5) == updates + 1  # what floats make of it


@pytest.mark.parametrize(("batch", "base"), [(4096, 128), (2048, 128), (192, 128)])
def test_the_weights_are_normal_with_mean_one_and_variance_ratio_minus_one(batch, base):
    n, variance = 200_000, batch / base - 1
    z = noise_weights(n, batch, base, seeded()).double()
    x = (z - 1) / sqrt(variance)
    within = 4 / sqrt(n)  # four standard errors, times each moment's own deviation
    assert abs(x.mean()) < within
    assert abs(x.square().mean() - 1) < within * sqrt(2)
    assert abs(x.pow(3).mean()) < within * sqrt(15)
    assert abs(x.pow(4).mean() - 3) < within * sqrt(96)
    assert abs((x[1:] * x[:-1]).mean()) < within


def test_the_base_batch_has_no_noise():
    assert noise_weights(5, 128, 128, seeded()).equal(torch.ones(5))


def test_the_generator_alone_decides_the_weights():
    draw = seeded()
    first, second = (noise_weights(100, 256, 128, draw) for _ in range(2))
    assert noise_weights(100, 256, 128, seeded()).equal(first)
    assert not first.equal(second)
    assert not noise_weights(100, 256, 128, seeded(1)).equal(first)


def test_noise_cannot_be_taken_away_from_a_batch_below_the_base():
    with pytest.raises(InputError, match=r"^batch: 64 is below base_batch 128"):
        noise_weights(5, 64, 128, seeded())


@pytest.mark.parametrize("batch", [32, 128, 512, 1280])
def test_adams_averages_reach_as_many_samples_back_at_every_batch(batch):
    """An average with decay beta reaches 1 / (1 - beta) batches back."""
    betas, eps = scale_adam((0.9, 0.999), 1e-8, batch, 128)
    reached = [batch / (1 - beta) for beta in betas]
    assert reached == pytest.approx([128 / 0.1, 128 / 0.001])
    assert eps * sqrt(batch) == pytest.approx(1e-8 * sqrt(128))


def test_a_batch_whose_scaled_betas_would_be_negative_is_refused_with_the_largest_that_is_not():
    line = r"^batch: 1281 .* scales Adam's beta of 0\.9 to -0\.000781; use 1280 or less, larger b"
    with pytest.raises(InputError, match=line):
        scale_adam((0.9, 0.999), 1e-8, 1281, 128)
