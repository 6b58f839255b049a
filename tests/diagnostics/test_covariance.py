"""The closed-form covariance of increments, against Monte Carlo over batches."""

from itertools import permutations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ghostbatch import increment_covariance, to_ghost
from ghostbatch.diagnostics import (
    IncrementCovariance,
    cosine,
    effective_rank,
    per_sample_gradients,
)
from ghostbatch.errors import InputError

N, BATCH, SMALL = 24, 12, 3
SCHEMES = ("without", "with", "bernoulli")
DRAWS = 40_000


def problem(classes=2):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, classes)).double()
    x = torch.randn(N, 3, dtype=torch.float64) + 1  # so that the mean gradient is not 0
    return model, x, torch.randint(classes, (N,))


@pytest.fixture(scope="module")
def gradients():
    return per_sample_gradients(*problem())


@pytest.fixture(scope="module")
def moments():
    return increment_covariance(*problem())


def selections(scheme, batch, seed=0, skip=0):
    """Return how often each sample is in each of many batches, (DRAWS, N)."""
    draw = torch.Generator().manual_seed(seed)
    if scheme == "with":
        chosen = torch.randint(N, (DRAWS, batch), generator=draw)
    elif scheme == "without":
        order = torch.rand(DRAWS, N, generator=draw).argsort(1)
        chosen = order[:, skip : skip + batch]
    else:
        return (torch.rand(DRAWS, N, generator=draw) < batch / N).double()
    return F.one_hot(chosen, N).sum(1).double()


def assert_covariance(first, second, expected):
    """Check every entry of the mean product to 4 standard errors, and 95 % of them to 3."""
    first, second = first - first.mean(0), second - second.mean(0)
    products = first[:, :, None] * second[:, None, :]
    error = products.std(0) / DRAWS**0.5
    off = (products.mean(0) - expected).abs() / error
    trace = first.mul(second).sum(1)
    trace_off = (trace.mean() - expected.trace()).abs() / (trace.std() / DRAWS**0.5)
    assert trace_off < 3
    assert off.max() < 4
    assert (off < 3).double().mean() > 0.95


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_covariance_of_an_increment_matches_monte_carlo(gradients, moments, scheme):
    steps = -0.3 * selections(scheme, BATCH) @ gradients / BATCH
    assert_covariance(steps, steps, moments.covariance(BATCH, scheme=scheme, lr=0.3))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_covariance_with_noise_matches_monte_carlo(gradients, moments, scheme):
    variance = BATCH / SMALL - 1
    chosen = selections(scheme, BATCH)
    draw = torch.Generator().manual_seed(1)
    # A sample that is drawn k times has k weights, whose sum has the deviation sqrt(k).
    noise = torch.randn(DRAWS, N, generator=draw, dtype=torch.float64)
    weighted = chosen + variance**0.5 * chosen.sqrt() * noise
    steps = weighted @ gradients / BATCH
    assert_covariance(steps, steps, moments.covariance(BATCH, scheme=scheme, noise=variance))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_covariance_between_two_batches_matches_monte_carlo(gradients, moments, scheme):
    first = selections(scheme, 6) @ gradients / 6
    other = {"skip": 6} if scheme == "without" else {"seed": 1}
    second = selections(scheme, 6, **other) @ gradients / 6
    assert_covariance(first, second, moments.between(scheme=scheme))


def test_batches_that_straddle_two_permutations_have_their_exact_covariance(gradients):
    """All streams of three permutations of four samples, in batches of three."""
    few, batch = gradients[:4], 3
    moments = IncrementCovariance(few.mean(0), few.T @ few / 4, samples=4)
    orders = torch.tensor(list(permutations(range(4))))
    triples = torch.cartesian_prod(*[torch.arange(len(orders))] * 3)
    means = few[orders[triples].flatten(1)].unflatten(1, (-1, batch)).mean(2)
    means = means - means.mean(0)
    exact = torch.einsum("sip,sjq->ijpq", means, means) / len(means)
    parts = torch.tensor([[3, 0, 0], [1, 2, 0], [0, 2, 1], [0, 0, 3]])  # samples by permutation
    for i, mine in enumerate(parts):
        known = moments.covariance(batch, straddling=int(mine.max()))
        torch.testing.assert_close(exact[i, i], known)
        for j in {0, 1, 2, 3} - {i}:
            overlap = float(mine @ parts[j]) / batch**2
            torch.testing.assert_close(exact[i, j], moments.between(overlap=overlap))


def test_the_sum_of_all_batches_of_a_permutation_has_no_variance(moments):
    batches = N // SMALL
    total = batches * moments.covariance(SMALL) + batches * (batches - 1) * moments.between()
    assert total.norm() < 1e-12 * moments.covariance(SMALL).norm()


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("rule", ["none", "sqrt", "linear", "noise"])
def test_the_remainder_of_each_rule_is_the_difference_of_the_covariances(moments, scheme, rule):
    noise = BATCH / SMALL - 1 if rule == "noise" else 0.0
    lr = {"sqrt": (BATCH / SMALL) ** 0.5, "linear": BATCH / SMALL}.get(rule, 1.0)
    large = moments.covariance(BATCH, scheme=scheme, lr=lr, noise=noise)
    small = moments.covariance(SMALL, scheme=scheme)
    known = moments.remainder(rule, BATCH, SMALL, scheme=scheme)
    torch.testing.assert_close(large - small, known, rtol=1e-9, atol=1e-14)
    check = moments.rule(rule, BATCH, SMALL, scheme=scheme)
    assert check.ratio == pytest.approx(float(large.trace() / small.trace()))
    assert check.remainder == pytest.approx(float(known.norm() / small.norm()), abs=1e-12)


def test_sqrt_is_exact_with_replacement_and_off_by_a_known_factor_otherwise(moments):
    assert moments.rule("sqrt", BATCH, SMALL, scheme="with").remainder < 1e-12
    for scheme in ("without", "bernoulli"):
        check = moments.rule("sqrt", BATCH, SMALL, scheme=scheme)
        assert check.ratio == pytest.approx((N - BATCH) / (N - SMALL))
        assert check.cosine == pytest.approx(1)
        linear = moments.rule("linear", BATCH, SMALL, scheme=scheme)
        assert linear.ratio == pytest.approx(check.ratio * BATCH / SMALL)


def test_noise_is_exact_for_bernoulli_selection_and_adds_the_mean_with_replacement(moments):
    assert moments.rule("noise", BATCH, SMALL, scheme="bernoulli").remainder < 1e-12
    gap = 1 / SMALL - 1 / BATCH
    excess = moments.remainder("noise", BATCH, SMALL, scheme="with")
    torch.testing.assert_close(excess, gap * torch.outer(moments.mean, moments.mean))


def test_per_sample_gradients_equal_those_of_backward(gradients):
    model, x, y = problem()
    for n in range(3):
        model.zero_grad()
        F.cross_entropy(model(x[n : n + 1]), y[n : n + 1]).backward()
        expected = torch.cat([p.grad.flatten() for p in model.parameters()])
        torch.testing.assert_close(gradients[n], expected)


def test_chunks_do_not_change_the_moments_and_only_selects_parameters(gradients, moments):
    model, x, y = problem()
    chunked = increment_covariance(model, x, y, chunk=5)
    torch.testing.assert_close(chunked.second, moments.second)
    torch.testing.assert_close(chunked.mean, gradients.mean(0))
    bias = increment_covariance(model, x, y, only=["0.bias"])
    torch.testing.assert_close(bias.second, moments.second[-2:, -2:])


@pytest.mark.parametrize("scheme", SCHEMES)
def test_mean_to_deviation_matches_monte_carlo(gradients, moments, scheme):
    steps = selections(scheme, BATCH) @ gradients / BATCH
    mean, deviation = steps.mean(0).norm(), steps.var(0).sum().sqrt()
    assert moments.mean_to_deviation(BATCH, scheme=scheme) == pytest.approx(
        float(mean / deviation), rel=0.02
    )


def trained_network():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4)).double()
    x = torch.randn(40, 6, dtype=torch.float64)
    y = x[:, :4].argmax(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(20):  # train a little, so that a wrong label has a large loss
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model, x, y


@pytest.mark.parametrize("change", ["dropout", "dropconnect", "labels"])
def test_dropout_dropconnect_and_label_noise_change_the_structure_of_the_covariance(change):
    """Two estimates of the changed matrix agree with each other but not with the plain one."""
    plain = increment_covariance(*trained_network()).centred
    one, two = (
        increment_covariance(*trained_network(), change=change, draws=100, seed=seed).centred
        for seed in (0, 1)
    )
    assert 1 - cosine(one, plain) > 5 * (1 - cosine(one, two))
    assert cosine(one, plain) < 0.9
    assert abs(effective_rank(one) - effective_rank(plain)) > 3 * abs(
        effective_rank(one) - effective_rank(two)
    )


def test_dropconnect_draws_masks_in_the_order_of_the_layers(monkeypatch):
    """A set of names would have another order in every process, and so would the draws."""
    model = nn.Sequential(*(nn.Linear(size, size + 1) for size in range(2, 10)))
    dropout, masked = F.dropout, []

    def recorded(weight, strength):
        masked.append(weight.shape)
        return dropout(weight, strength)

    monkeypatch.setattr(F, "dropout", recorded)
    increment_covariance(model, torch.ones(2, 2), torch.zeros(2).long(), change="dropconnect")
    assert masked == [layer.weight.shape for layer in model]


def test_random_loss_weights_change_only_the_scale_of_the_second_moment():
    plain = increment_covariance(*trained_network())
    noisy = increment_covariance(*trained_network(), change="weights", strength=3.0, draws=300)
    assert cosine(noisy.second, plain.second) > 0.995
    assert float(noisy.second.trace() / plain.second.trace()) == pytest.approx(4, rel=0.05)


def test_label_noise_has_the_moments_of_the_mixture_over_classes():
    model, x, y = trained_network()
    every = torch.stack([per_sample_gradients(model, x, torch.full_like(y, c)) for c in range(4)])
    right = per_sample_gradients(model, x, y)
    expected = 0.7 * right.T @ right / 40
    expected += 0.3 * torch.einsum("cni,cnj->ij", every, every) / 160
    found = increment_covariance(model, x, y, change="labels", strength=0.3, draws=300)
    assert cosine(found.second, expected) > 0.995
    assert float(found.second.trace() / expected.trace()) == pytest.approx(1, rel=0.05)


@pytest.mark.parametrize("ghost", [True, False], ids=["ghost norm", "plain norm"])
def test_gradients_are_taken_in_evaluation_mode_and_the_model_is_restored(ghost):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 2))
    model = to_ghost(model, 4) if ghost else model
    model[1].running_mean.normal_()
    before = {n: t.clone() for n, t in model.state_dict().items()}
    _, x, y = problem()
    state = torch.get_rng_state()
    found = increment_covariance(model, x.float(), y, change="dropout")
    plain = increment_covariance(model, x.float(), y)
    assert not torch.equal(found.second, plain.second)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training
    assert all(torch.equal(before[n], t) for n, t in model.state_dict().items())
    assert not model[0]._forward_pre_hooks
    model.eval()
    F.cross_entropy(model(x.float()), y).backward()
    expected = torch.cat([p.grad.flatten() for p in model.parameters()]).double()
    torch.testing.assert_close(plain.mean, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("field", "call"),
    [
        ("change", lambda _: increment_covariance(*problem(), change="dropin")),
        ("strength", lambda _: increment_covariance(*problem(), change="labels", strength=2)),
        ("strength", lambda _: increment_covariance(*problem(), change="weights", strength=-1)),
        ("draws", lambda _: increment_covariance(*problem(), change="labels", draws=0)),
        ("chunk", lambda _: increment_covariance(*problem(), chunk=0)),
        ("only", lambda _: increment_covariance(*problem(), only=["1.bias"])),
        ("only", lambda _: per_sample_gradients(nn.Linear(99, 99), torch.ones(2, 99), None)),
        ("labels", lambda _: increment_covariance(*problem()[:2], torch.zeros(2))),
        ("scheme", lambda m: m.covariance(2, scheme="stratified")),
        ("batch", lambda m: m.covariance(N + 1)),
        ("straddling", lambda m: m.covariance(2, straddling=3)),
        ("rule", lambda m: m.rule("cubic", 4, 2)),
        ("batch", lambda m: m.rule("noise", 2, 4)),
    ],
    ids=[
        "unknown change",
        "probability above 1",
        "negative variance",
        "no draws",
        "no samples per pass",
        "unknown parameter",
        "too many values",
        "fewer labels than inputs",
        "unknown scheme",
        "batch above the samples",
        "more of the next permutation than the batch",
        "unknown rule",
        "noise for a smaller batch",
    ],
)
def test_bad_input_is_refused_by_name(moments, field, call):
    with pytest.raises(InputError) as raised:
        call(moments)
    assert raised.value.field == field


def test_effective_rank_counts_equal_eigenvalues_and_ignores_scale():
    spread = torch.diag(torch.tensor([1.0] * 5 + [0.0] * 3))
    assert effective_rank(spread) == pytest.approx(5)
    assert np.isclose(effective_rank(7 * spread), 5)
