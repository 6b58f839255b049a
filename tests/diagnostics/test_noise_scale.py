"""The gradient noise scale of gradients with known moments, from every kind of parts."""

import json
from itertools import pairwise, permutations, product
from math import inf, isnan

import numpy as np
import pytest
import torch
from torch import nn

from ghostbatch import GradientNoiseScale, InputError
from ghostbatch.diagnostics.noise_scale import BLOCKS
from ghostbatch.diagnostics.plateau import student_quantile
from ghostbatch.diagnostics.ratio import ratio_interval

MODEL = nn.Linear(6, 1, bias=False, dtype=torch.float64)


class Regression:
    """Gradients of linear regression, y = N(0, deviation^2) at x ~ N(0, 1), at the weights ``w``.

    The gradient of a sample is r x with r = w.x - y: its mean is w, and tr(Sigma) is the mean of
    r^2 x^2 without |w|^2, which is (n + 1) |w|^2 + n deviation^2.
    """

    def __init__(self, w, deviation=1.0):
        self.w, self.deviation = torch.tensor(w, dtype=torch.float64), deviation
        self.signal = float(self.w @ self.w)
        self.noise = (len(w) + 1) * self.signal + len(w) * deviation**2

    def draw(self, seed, *shape):
        """Return gradients of samples, (*shape, n)."""
        draw = torch.Generator().manual_seed(seed)
        x = torch.randn(*shape, len(self.w), generator=draw, dtype=torch.float64)
        y = self.deviation * torch.randn(shape, generator=draw, dtype=torch.float64)
        return (x @ self.w - y)[..., None] * x


def measured(batches, parts):
    """Return the scale after these batches (updates, samples, n), cut into so many parts."""
    scale = GradientNoiseScale(MODEL)
    for gradients in batches.unflatten(1, (parts, -1)).mean(2):
        scale.update(gradients, batches.shape[1] // parts)
    return scale


@pytest.mark.parametrize("sizes", [(2, 2), (1, 3), (1, 1, 2)], ids=str)
def test_over_all_batches_of_a_population_the_estimates_are_exact(sizes):
    population = torch.tensor([[1.0, 0.0], [-2.0, 3.0], [4.0, 1.0]], dtype=torch.float64)
    mean = population.mean(0)
    scale = GradientNoiseScale(MODEL)
    for chosen in product(range(3), repeat=4):
        parts = population[list(chosen)].split(sizes)
        scale.update([part.mean(0) for part in parts], sizes)
    found = scale.estimate()
    assert found.updates == 81
    assert found.signal == pytest.approx(float(mean @ mean))
    assert found.noise == pytest.approx(float((population - mean).square().sum() / 3))
    assert float(found) == found.value == pytest.approx(found.noise / found.signal)


def test_without_replacement_the_signal_is_lower_by_the_noise_over_the_samples():
    samples = torch.tensor([[1.0, 0.0], [-2.0, 3.0], [4.0, 1.0], [0.0, -1.0], [1.0, 1.0]]).double()
    mean, scale = samples.mean(0), GradientNoiseScale(MODEL)
    for chosen in permutations(range(5), 4):
        scale.update(samples[list(chosen)].view(2, 2, 2).mean(1), samples=2)
    found = scale.estimate()
    assert found.noise == pytest.approx(float((samples - mean).square().sum() / 4))
    assert found.signal == pytest.approx(float(mean @ mean) - found.noise / 5)


def test_equal_parts_give_mccandlish_et_als_estimates():
    batch, parts = Regression([1.0, 2.0, 0.0]).draw(0, 24), 4
    small = batch.view(parts, 6, 3).mean(1).square().sum(1).mean()
    large = batch.mean(0).square().sum()
    found = measured(batch[None], parts).estimate()
    assert found.signal == pytest.approx(float((24 * large - 6 * small) / (24 - 6)))
    assert found.noise == pytest.approx(float((small - large) / (1 / 6 - 1 / 24)))


@pytest.mark.parametrize("parts", [2, 8])
def test_parts_of_any_size_find_the_noise_scale_of_linear_regression(parts):
    law = Regression([0.5, -0.5, 0.5, -0.5, 0.5, -0.5])
    found = measured(law.draw(1, 2000, 32), parts).estimate()
    assert found.signal == pytest.approx(law.signal, rel=0.03)
    assert found.noise == pytest.approx(law.noise, rel=0.05)
    low, high = found.interval
    assert low < law.noise / law.signal < high
    assert high - low < 0.15 * found.value


def test_the_interval_covers_the_noise_scale_as_often_as_it_says():
    law = Regression([0.4, 0.2, 0.0, -0.1])
    runs = law.draw(2, 300, 24, 16)
    intervals = [measured(batches, 4).estimate(0.9).interval for batches in runs]
    covered = sum(low < law.noise / law.signal < high for low, high in intervals)
    assert 0.85 < covered / 300 < 0.95
    assert all(low >= 0 for low, _ in intervals)


def test_without_a_mean_gradient_the_interval_has_no_end():
    runs = Regression([0.0] * 4).draw(3, 100, 24, 16)
    found = [measured(batches, 4).estimate() for batches in runs]
    assert sum(each.interval[1] == inf for each in found) >= 90  # 97.5 are expected
    assert {each.value == inf for each in found} == {True, False}
    assert all((each.value == inf) == (each.signal <= 0) for each in found)


def test_the_interval_has_the_ratios_that_students_t_accepts():
    draw = np.random.default_rng(0)
    ratios = np.geomspace(1e-3, 1e4, 4000)
    ends = set()
    for mean in (2.0, 0.4, 0.0, -2.0):
        counts = np.array([4] * 11 + [3])
        sums = draw.normal([mean, 3.0], 1.0, (12, 2)) * counts[:, None] ** 0.5
        sums += counts[:, None] * [mean, 3.0] - counts[:, None] ** 0.5 * [mean, 3.0]
        blocks = np.column_stack([counts, sums])
        left = sums[:, 1, None] - ratios * sums[:, 0, None]
        average = left.sum(0) / counts.sum()
        spread = ((left - counts[:, None] * average) ** 2 / counts[:, None]).sum(0) / 11
        t = student_quantile(11)
        accepted = average**2 <= t**2 * spread / counts.sum()
        low, high = ratio_interval(blocks, 0.95)
        assert (accepted == ((low <= ratios) & (ratios <= high))).all()
        ends.add((low < inf, high < inf))
    assert ends == {(True, True), (True, False), (False, False)}


def test_many_updates_are_averaged_in_few_blocks():
    law = Regression([1.0, 0.0, 0.0])
    batches = law.draw(4, 10 * BLOCKS + 3, 8)
    scale = measured(batches, 2)
    g = batches.mean(1).square().sum(1)
    halves = batches.view(-1, 2, 4, 3).mean(2).square().sum((1, 2))
    noise = 4 * halves - 8 * g
    found = scale.estimate()
    assert found.updates == len(batches)
    assert found.noise == pytest.approx(float(noise.mean()))
    assert found.signal == pytest.approx(float((g - noise / 8).mean()))
    blocks = [row for row in scale.state_dict()["sums"] if row[0]]
    assert [row[0] for row in blocks] == [16] * 40 + [3]


def network():
    torch.manual_seed(0)
    layers = nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)
    return nn.Sequential(*layers).double()


def data(samples=12, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(samples, 5, generator=draw, dtype=torch.float64)


def gradients(model, x):
    return torch.autograd.grad(model(x).square().mean(), list(model.parameters()))


def same(found, expected):
    assert vars(found) == {
        name: value if isinstance(value, int) else pytest.approx(value)
        for name, value in vars(expected).items()
    }


@pytest.mark.parametrize("sizes", [(3, 3, 3, 3), (2, 7, 3)], ids=str)
@pytest.mark.parametrize("factor", [1.0, 12.0], ids=["mean", "sum"])
def test_gradients_that_accumulate_give_what_their_list_gives(sizes, factor):
    model = network()
    model.register_parameter("unused", nn.Parameter(torch.ones(2, dtype=torch.float64)))
    accumulated, listed = GradientNoiseScale(model), GradientNoiseScale(network())
    for seed in range(3):
        x = data(seed=seed)
        model.zero_grad(set_to_none=seed == 1)
        for part in x.split(sizes):
            (factor * len(part) / 12 * model(part).square().mean()).backward()
            accumulated.part(len(part))
        before = [p.grad.clone() for p in model[0].parameters()]
        accumulated.update()
        assert all(map(torch.equal, before, (p.grad for p in model[0].parameters())))
        listed.update([gradients(network(), part) for part in x.split(sizes)], sizes)
    found, expected = accumulated.estimate(), listed.estimate()
    assert found.value == pytest.approx(expected.value)
    assert found.interval == pytest.approx(expected.interval)
    assert found.noise == pytest.approx(factor**2 * expected.noise)


def test_a_gradient_may_be_a_tensor_a_list_or_a_dictionary():
    parts = [gradients(network(), part) for part in data().split(4)]
    forms = [
        (torch.cat([g.flatten() for g in part]) for part in parts),
        parts,
        [dict(zip("abcd", part, strict=True)) for part in parts],
    ]
    found = []
    for form in forms:
        scale = GradientNoiseScale(MODEL)
        scale.update(form, samples=4)
        found.append(scale.estimate())
    assert all(first == second for first, second in pairwise(found))


def test_it_continues_from_a_checkpoint_of_plain_numbers():
    batches = Regression([1.0, 0.0, 0.0]).draw(5, 3 * BLOCKS, 8)
    whole, first = measured(batches, 2), measured(batches[: 2 * BLOCKS - 1], 2)
    saved = json.loads(json.dumps(first.state_dict()))
    resumed = GradientNoiseScale(MODEL)
    resumed.load_state_dict(saved)
    assert resumed.estimate() == first.estimate()
    for batch in batches[2 * BLOCKS - 1 :]:
        resumed.update(batch.view(2, 4, 3).mean(1), 4)
    assert resumed.estimate() == whole.estimate()


def test_a_gradient_that_is_not_finite_does_not_count():
    good, bad = torch.tensor([[1.0], [3.0]]), torch.tensor([[torch.inf], [3.0]])
    scale = GradientNoiseScale(MODEL)
    for parts in (good, bad, good):
        scale.update(parts, 1)
    found = scale.estimate()
    assert (found.updates, found.noise, found.signal) == (2, 2.0, 3.0)


def test_nothing_is_known_before_two_updates_and_after_a_reset():
    scale = measured(Regression([1.0]).draw(0, 1, 8), 2)
    assert scale.estimate().interval == (0.0, inf)
    scale.reset()
    found = scale.estimate()
    assert (found.updates, found.interval, isnan(found.value)) == (0, (0.0, inf), True)
    scale.load_state_dict(scale.state_dict())
    assert scale.estimate().updates == 0


def test_gradients_of_zero_have_no_noise_scale():
    found = measured(torch.zeros(3, 4, 2), 2).estimate()
    assert isnan(found.value)
    assert found.interval == (0.0, inf)


def with_gradients(model=MODEL):
    model.weight.grad = torch.ones_like(model.weight)
    return GradientNoiseScale(model)


def one_part():
    scale = with_gradients()
    scale.part(3)
    scale.update()


@pytest.mark.parametrize(
    ("field", "call"),
    [
        ("model", lambda: GradientNoiseScale(nn.ReLU())),
        ("model", lambda: GradientNoiseScale(nn.Linear(1, 1)).part(3)),
        ("samples", lambda: with_gradients().part(0)),
        ("samples", lambda: with_gradients().update(torch.ones(3, 2), [4, 4])),
        ("samples", lambda: with_gradients().update(torch.ones(3, 2))),
        ("samples", lambda: with_gradients().update(torch.ones(3, 2), 0)),
        ("parts", lambda: with_gradients().update()),
        ("parts", one_part),
        ("parts", lambda: with_gradients().update(torch.ones(1, 2), 4)),
        ("level", lambda: with_gradients().estimate(95)),
    ],
)
def test_bad_input_is_refused_by_name(field, call):
    with pytest.raises(InputError) as raised:
        call()
    assert raised.value.field == field
