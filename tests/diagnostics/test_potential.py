"""The random potential of losses with a known exponent; the model is restored; scans resume."""

import json
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from small_networks import Counting
from torch import nn

from ghostbatch import random_potential, to_ghost
from ghostbatch.diagnostics import BatchedLoss, fit_roughness, scan
from ghostbatch.errors import InputError


class Point(nn.Module):
    """A module with weights only, for losses that are a function of the weights."""

    def __init__(self, size=60):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(size, dtype=torch.float64))


def random_vector(size=60, seed=3):
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(size, generator=draw, dtype=torch.float64)


def test_a_loss_linear_along_a_line_has_alpha_two_exactly():
    found = random_potential(Point(1), lambda m: 5 + 3 * m.w.sum(), radius=4, samples=100)
    assert found.alpha == pytest.approx(2, abs=1e-9)
    assert found.origin == 5
    assert [abs(loss - 5) for loss in found.losses] == pytest.approx(
        [3 * z for z in found.distances]
    )


def test_a_quadratic_loss_at_its_minimum_has_alpha_four_exactly():
    found = random_potential(Point(), lambda m: m.w.square().sum(), radius=4, samples=100)
    assert found.alpha == pytest.approx(4, abs=1e-9)
    assert np.isnan(found.detrended.alpha)  # nothing is left without the trend


def test_removing_a_quadratic_trend_recovers_the_exponent_of_the_gradient():
    gradient = random_vector()
    found = random_potential(
        Point(), lambda m: 0.3 * gradient @ m.w + 2 * m.w.square().sum(), radius=2, samples=1000
    )
    assert found.alpha > 2.5
    assert abs(found.detrended.alpha - 2) < 3 * found.detrended.alpha_stderr


def test_losses_that_are_not_finite_do_not_change_the_exponents():
    gradient = random_vector()
    near = random_potential(Point(), lambda m: gradient @ m.w, radius=2, samples=300).within(1)

    def loss(m):
        return gradient @ m.w if m.w.norm() <= 1 else torch.inf

    found = random_potential(Point(), loss, radius=2, samples=300)
    assert (found.alpha, found.alpha_stderr) == (near.alpha, near.alpha_stderr)
    assert vars(found.detrended) == pytest.approx(vars(near.detrended))


@pytest.mark.parametrize("alpha", [1.0, 1.5, 2.0, 3.0])  # with 2 it is linear
def test_a_field_of_independent_directions_gives_its_exponent(alpha):
    ray = random_vector()

    def loss(m):
        z = m.w.norm().clamp(min=1e-300)
        return z ** (alpha / 2) * (ray @ m.w / z)

    found = random_potential(Point(), loss, radius=10, samples=1000)
    assert found.alpha_stderr == pytest.approx((2 / 1000) ** 0.5, rel=0.15)  # Var ln z is 1
    assert abs(found.alpha - alpha) < 3 * found.alpha_stderr
    assert abs(found.detrended.alpha - alpha) < 3 * found.detrended.alpha_stderr


@pytest.mark.parametrize("alpha", [1.0, 1.5])
def test_random_fields_give_their_exponent_on_average(alpha):
    """The fields are sums of waves of all lengths, with E (L1 - L2)^2 ~ d^alpha."""
    size, waves, found = 40, 1000, []
    for seed in range(20):
        draw = np.random.default_rng(seed)
        number = np.exp(draw.uniform(np.log(1e-2), np.log(1e4), waves))
        k = torch.from_numpy(draw.standard_normal((waves, size)) * number[:, None])
        height = torch.from_numpy(number ** (-alpha / 2) * draw.standard_normal(waves))
        phase = torch.from_numpy(draw.uniform(0, 2 * np.pi, waves))

        def field(m, k=k, height=height, phase=phase):
            return height @ torch.cos(k @ m.w + phase)

        found.append(random_potential(Point(size), field, radius=10, samples=150, seed=seed))
    alphas = [each.alpha for each in found]
    spread = np.std(alphas, ddof=1)
    assert abs(np.mean(alphas) - alpha) < 3 * spread / 20**0.5
    # All samples of a field share its value at the origin, so alpha varies more than its error.
    assert spread < 2.5 * np.mean([each.alpha_stderr for each in found])


@pytest.mark.parametrize("alpha", [1.0, 2.0, 3.0])
def test_the_standard_error_of_alpha_is_its_deviation_over_many_scans(alpha):
    draw = np.random.default_rng(0)
    z = draw.uniform(0, 5, (300, 200))
    changes = z ** (alpha / 2) * draw.standard_normal(z.shape)
    fits = [fit_roughness(*each) for each in zip(z, changes, strict=True)]
    spread = np.std([fit.alpha for fit in fits])
    assert np.mean([fit.alpha_stderr for fit in fits]) == pytest.approx(spread, rel=0.15)
    assert abs(np.mean([fit.alpha for fit in fits]) - alpha) < 4 * spread / 300**0.5 + 0.02


def test_alpha_is_the_maximum_of_the_likelihood():
    draw = np.random.default_rng(1)
    z = draw.uniform(0, 5, 200)
    change = z * draw.standard_normal(200)
    change[:3] = 0.0  # changes of 0 count as samples too

    def likelihood(alpha):
        variance = (change**2 * z**-alpha).mean() * z**alpha
        return -0.5 * (np.log(variance) + change**2 / variance).sum()

    grid = np.linspace(1, 3, 20001)
    best = grid[np.argmax([likelihood(a) for a in grid])]
    fit = fit_roughness(z, change)
    assert fit.alpha == pytest.approx(best, abs=2e-4)
    h = 1e-3
    bend = (likelihood(best + h) - 2 * likelihood(best) + likelihood(best - h)) / h**2
    assert fit.alpha_stderr == pytest.approx((-1 / bend) ** 0.5, rel=1e-2)


def test_bins_contain_every_sample_once_and_give_root_mean_squares():
    gradient = random_vector()
    found = random_potential(
        Point(), lambda m: gradient @ m.w, radius=2, samples=300, bins=(1, 5, 12)
    )
    assert list(found.binned) == [1, 5, 12]
    z, change = np.array(found.distances), np.array(found.changes)
    for count, bins in found.binned.items():
        assert sum(bins.counts) == 300
        edges = np.linspace(0, 2, count + 1)
        inside = [(low <= z) & (z < high) for low, high in pairwise(edges)]
        expected = [np.sqrt((change[i] ** 2).mean()) for i in inside]
        assert bins.rms == pytest.approx(expected)
        assert bins.distances == pytest.approx([z[i].mean() for i in inside])
        assert all(0 < e < r for e, r in zip(bins.rms_stderr, bins.rms, strict=True))


def test_a_smaller_radius_uses_the_samples_within_it():
    gradient = random_vector()
    found = random_potential(Point(), lambda m: gradient @ m.w, radius=2, samples=800)
    near = found.within(0.5)
    assert max(near.distances) <= 0.5 == near.radius
    assert 140 < len(near.distances) < 260
    assert abs(near.alpha - 2) < 3 * near.alpha_stderr
    with pytest.raises(InputError, match=r"^radius: "):
        found.within(3)


def network(norm="plain"):
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Dropout(0.5), nn.Flatten()]
    model = nn.Sequential(*layers, nn.Linear(48, 4), Counting())
    return to_ghost(model, 4) if norm == "ghost" else model


def data():
    draw = torch.Generator().manual_seed(0)
    return torch.randn(20, 1, 6, 6, generator=draw), torch.randint(4, (20,), generator=draw)


def contents(model):
    buffers = [(n, id(b)) for m in model.modules() for n, b in m._buffers.items()]
    return buffers, {n: t.numpy().tobytes() for n, t in model.state_dict().items()}


@pytest.mark.parametrize("norm", ["plain", "ghost"])
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_the_model_is_restored_bit_for_bit(norm, training):
    model = network(norm).train(training).to(memory_format=torch.channels_last)
    model[0].requires_grad_(False)
    before, modes = contents(model), [m.training for m in model.modules()]
    found = random_potential(model, BatchedLoss(*data(), batch=10), radius=3, samples=5)
    assert contents(model) == before
    assert [m.training for m in model.modules()] == modes
    assert model[1].track_running_stats
    assert len(set(found.losses)) == 5


@pytest.mark.parametrize("calls", [1, 3])
def test_the_model_is_restored_after_a_loss_that_changes_modes_and_buffers_and_fails(calls):
    model = network()
    before, remaining = contents(model), [calls]

    def fail(m):
        m.train()
        m(data()[0])  # changes the running statistics
        remaining[0] -= 1
        if not remaining[0]:
            raise KeyboardInterrupt
        return 1.0

    with pytest.raises(KeyboardInterrupt):
        random_potential(model, fail, radius=3, samples=5)
    assert contents(model) == before


def test_norms_use_batch_statistics_and_dropout_is_off():
    model, (x, y) = network().eval(), data()
    found = random_potential(model, BatchedLoss(x, y, batch=10), radius=1, samples=2)
    conv, norm, relu, _, flat, linear, _ = model
    losses = [
        F.cross_entropy(
            linear(flat(relu(F.batch_norm(conv(part), None, None, norm.weight, norm.bias, True)))),
            labels,
        )
        for part, labels in zip(x.split(10), y.split(10), strict=True)
    ]
    assert found.origin == pytest.approx(sum(losses).item() / 2, rel=1e-6)


def test_a_loss_can_have_another_criterion():
    model, inputs, labels = nn.Linear(3, 2), torch.randn(7, 3), torch.randn(7, 2)

    def squares(outputs, labels):
        return (outputs - labels).square().sum()

    found = BatchedLoss(inputs, labels, batch=4, criterion=squares, prepare=torch.neg)(model)
    assert found.item() == pytest.approx(2 * F.mse_loss(model(-inputs), labels).item())


def test_with_kernels_a_plain_norm_is_measured_as_one_large_ghost(monkeypatch):
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.BatchNorm1d(5, affine=False))
    inputs, labels = torch.randn(12, 3), torch.randint(5, (12,))
    seen = []

    def loss(m):
        seen.append(tuple(type(layer).__name__ for layer in m))
        return BatchedLoss(inputs, labels, batch=6)(m)

    monkeypatch.setattr(scan, "has_kernels", lambda _: False)
    expected = random_potential(model, loss, radius=1, samples=3)
    monkeypatch.setattr(scan, "has_kernels", lambda weight: weight.dtype == torch.float32)
    found = random_potential(model, loss, radius=1, samples=3)
    assert found.losses == pytest.approx(expected.losses, rel=1e-5)
    assert (
        seen[0]
        == ("Linear", "BatchNorm1d", "BatchNorm1d")
        == tuple(type(layer).__name__ for layer in model)
    )
    assert seen[-1] == ("Linear", "GhostBatchNorm1d", "BatchNorm1d")


def test_directions_are_unit_vectors_uniform_on_the_sphere():
    seen = []
    model = Point(3)
    model.w.data += 1

    def look(m):
        seen.append(m.w.detach() - 1)
        return 0.0

    found = random_potential(model, look, radius=2, samples=2000)
    steps = torch.stack(seen[1:])
    assert steps.norm(dim=1).tolist() == pytest.approx(found.distances)
    unit = steps / steps.norm(dim=1, keepdim=True)
    assert (unit.mean(0).abs() < 4 * (1 / 3 / 2000) ** 0.5).all()
    torch.testing.assert_close(
        unit.T @ unit / 2000, torch.eye(3, dtype=torch.float64) / 3, rtol=0, atol=0.03
    )
    assert np.mean(found.distances) == pytest.approx(1, abs=4 * (4 / 12 / 2000) ** 0.5)


def test_an_interrupted_scan_continues_with_the_next_sample(tmp_path):
    gradient, file = random_vector(), tmp_path / "scan.json"
    done = []

    def loss(m):
        return gradient @ m.w

    def stop(number):
        done.append(number)
        if number == 7:
            raise KeyboardInterrupt

    def resume(on_sample):
        return random_potential(
            Point(), loss, radius=2, samples=20, resume=file, on_sample=on_sample
        )

    expected = random_potential(Point(), loss, radius=2, samples=20)
    with pytest.raises(KeyboardInterrupt):
        resume(on_sample=stop)
    assert len(json.loads(file.read_text())["losses"]) == 7
    assert [path.name for path in tmp_path.iterdir()] == ["scan.json"]
    assert resume(on_sample=done.append) == expected
    assert done == list(range(1, 21))
    done.clear()
    assert resume(on_sample=done.append) == expected
    assert done == []


def test_losses_are_written_while_the_scan_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(scan, "SAVE_SECONDS", -1.0)
    written = []

    def look(_number):
        written.append(len(json.loads((tmp_path / "scan").read_text())["losses"]))

    random_potential(
        Point(), lambda m: m.w.sum(), radius=1, samples=3, resume=tmp_path / "scan", on_sample=look
    )
    assert written == [1, 2, 3]


@pytest.mark.parametrize(
    "change", [{"radius": 3}, {"seed": 1}, {"loss": lambda _: 7.0}], ids=["radius", "seed", "loss"]
)
def test_a_file_of_another_scan_is_refused(tmp_path, change):
    options = {"radius": 2, "seed": 0, "loss": lambda m: 1 + m.w.sum()}
    file = tmp_path / "scan.json"

    def run(radius, seed, loss):
        random_potential(Point(), loss, radius=radius, seed=seed, samples=4, resume=file)

    run(**options)
    before = file.read_bytes()
    with pytest.raises(InputError, match=r"^resume: .* is of another scan"):
        run(**{**options, **change})
    assert file.read_bytes() == before
    file.write_text("mine")
    for _ in ("a text", "a folder"):
        with pytest.raises(InputError, match=r"^resume: .* is not a scan"):
            run(**options)
        file = tmp_path


@pytest.mark.parametrize(
    ("field", "call"),
    [
        ("radius", lambda: random_potential(Point(), lambda _: 0.0, radius=-1)),
        ("samples", lambda: random_potential(Point(), lambda _: 0.0, radius=1, samples=1)),
        ("bins", lambda: random_potential(Point(), lambda _: 0.0, radius=1, bins=(0,))),
        ("model", lambda: random_potential(nn.ReLU(), lambda _: 0.0, radius=1)),
        ("labels", lambda: BatchedLoss(torch.zeros(3), torch.zeros(4))),
        ("batch", lambda: BatchedLoss(torch.zeros(11), torch.zeros(11), batch=10)),
    ],
    ids=[
        "negative radius",
        "one sample",
        "no bins",
        "no parameters",
        "more labels than inputs",
        "last batch of one",
    ],
)
def test_bad_input_is_refused_by_name(field, call):
    with pytest.raises(InputError) as raised:
        call()
    assert raised.value.field == field
