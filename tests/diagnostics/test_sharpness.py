"""The largest eigenvalue of the Hessian, plain and relative, is that of the dense matrix."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, hessian

from ghostbatch import InputError, to_ghost
from ghostbatch.diagnostics import BatchedLoss, largest_eigenvalue
from ghostbatch.diagnostics.sharpness import lanczos

FP64 = torch.float64
DRAW = torch.Generator().manual_seed(0)
INPUTS = torch.randn(20, 1, 6, 6, generator=DRAW, dtype=FP64)
LABELS = torch.randint(3, (20,), generator=DRAW)


class Weights(nn.Module):
    """A module with weights only, for losses that are a function of the weights."""

    def __init__(self, values):
        super().__init__()
        self.w = nn.Parameter(torch.tensor(values, dtype=FP64))


def network(norm="plain"):
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Dropout(0.5), nn.Flatten()]
    model = nn.Sequential(*layers, nn.Linear(32, 3)).double()
    if norm == "none":
        del model[1]
    return to_ghost(model, 4) if norm == "ghost" else model


def loss(model, sign=1):
    return sign * BatchedLoss(INPUTS, LABELS, batch=10)(model)


def dense(model, sign=1, relative=False):
    """Return the Hessian, with batch statistics and without dropout, as a matrix.

    Plain norms become ghost norms of one batch. That is the same function, in simple operations: of
    torch's own batch norm, torch.func returns Hessians that are not symmetric.
    """
    model = copy.deepcopy(model).train()
    if any(type(layer) is nn.BatchNorm2d for layer in model):
        to_ghost(model, 10)
    for layer in model:
        layer.track_running_stats = False
        if isinstance(layer, nn.Dropout):
            layer.eval()
    weights = {name: p for name, p in model.named_parameters() if p.requires_grad}
    flat = torch.cat([p.detach().flatten() for p in weights.values()])
    sizes = [p.numel() for p in weights.values()]

    def of(vector):
        parts = zip(weights.items(), vector.split(sizes), strict=True)
        state = {name: part.view_as(p) for (name, p), part in parts}
        halves = zip(INPUTS.split(10), LABELS.split(10), strict=True)
        losses = [F.cross_entropy(functional_call(model, state, (x,)), y) for x, y in halves]
        return sign * sum(losses) / 2

    scale = flat.abs() if relative else torch.ones_like(flat)
    return scale[:, None] * hessian(of)(flat) * scale


@pytest.mark.parametrize("norm", ["none", "plain", "ghost"])
@pytest.mark.parametrize("sign", [1, -1], ids=["loss", "minus the loss"])
@pytest.mark.parametrize("relative", [False, True], ids=["plain", "relative"])
def test_it_is_the_largest_eigenvalue_of_the_dense_hessian(norm, sign, relative):
    model = network(norm)
    values = torch.linalg.eigvalsh(dense(model, sign, relative))
    found = largest_eigenvalue(
        *(model, lambda m: loss(m, sign)), relative=relative, tolerance=1e-7, iterations=60
    )
    assert found.value == pytest.approx(float(values[-1]), rel=1e-6)
    assert found.residual <= 1e-7 * found.value
    assert values[0] < 0 < values[-1], "the Hessian is indefinite"
    assert (values[-1] < -values[0]) == (sign < 0), "of minus the loss, the largest is negative"


def test_a_random_matrix_gives_its_largest_eigenvalue_even_if_all_are_negative():
    torch.manual_seed(0)
    vectors, _ = torch.linalg.qr(torch.randn(30, 30, dtype=FP64))
    for values in (torch.linspace(-9, 4, 30), torch.linspace(-9, -1, 30)):
        matrix = vectors @ torch.diag(values.double()) @ vectors.T
        found = largest_eigenvalue(
            Weights([1.0] * 30), lambda m, a=matrix: m.w @ a @ m.w / 2, tolerance=1e-9
        )
        assert found.value == pytest.approx(float(values[-1]), rel=1e-6)
        assert found.iterations <= 30


@pytest.mark.parametrize("iterations", [1, 3, 8])
def test_an_eigenvalue_is_within_the_residual(iterations):
    model = network()
    matrix = dense(model)
    values = torch.linalg.eigvalsh(matrix)
    found = largest_eigenvalue(model, loss, iterations=iterations, tolerance=1e-9)
    assert found.iterations == iterations
    assert 0 < (values - found.value).abs().min() <= found.residual
    assert found.value < values[-1]


def test_the_residual_is_that_of_the_ritz_vector():
    torch.manual_seed(0)
    matrix, start = torch.randn(12, 12, dtype=FP64), torch.randn(12, dtype=FP64)
    matrix = matrix + matrix.T
    krylov = torch.stack([torch.linalg.matrix_power(matrix, k) @ start for k in range(5)], dim=1)
    basis, _ = torch.linalg.qr(krylov)
    values, vectors = torch.linalg.eigh(basis.T @ matrix @ basis)
    ritz = basis @ vectors[:, -1]
    found = lanczos(lambda v: matrix @ v, start, tolerance=1e-9, iterations=5)
    assert found.value == pytest.approx(float(values[-1]))
    assert found.residual == pytest.approx(float((matrix @ ritz - values[-1] * ritz).norm()))


@pytest.mark.parametrize("sign", [1, -1])
def test_iterations_end_with_the_distinct_eigenvalues(sign):
    found = largest_eigenvalue(Weights([1.0] * 9), lambda m: sign * (m.w.sum() - 1).square())
    assert (found.iterations, found.value) == (2, pytest.approx(9 + 9 * sign, abs=1e-12))


def test_a_loss_without_curvature_has_eigenvalue_zero():
    found = largest_eigenvalue(Weights([1.0, 2.0]), lambda m: m.w.sum())
    assert (found.value, found.residual, found.iterations) == (0.0, 0.0, 1)


def rescaled_pair(c):
    """Return a ReLU network whose second layer has inputs times c and the third undoes it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 5), nn.ReLU(), nn.Linear(5, 3)).double()
    with torch.no_grad():
        model[1].weight *= c
        model[1].bias *= c
        model[3].weight /= c
    return model


@pytest.mark.parametrize("c", [0.1, 10.0])
def test_rescaling_a_layer_pair_changes_the_eigenvalue_and_not_the_relative_one(c):
    before, after = rescaled_pair(1.0), rescaled_pair(c)
    assert loss(after).item() == pytest.approx(loss(before).item())
    plain, relative = (
        [largest_eigenvalue(m, loss, relative=r, tolerance=1e-7).value for m in (before, after)]
        for r in (False, True)
    )
    assert plain[1] > 3 * plain[0]
    assert relative[1] == pytest.approx(relative[0], rel=1e-6)


def test_a_factor_that_a_norm_divides_out_changes_only_the_eigenvalue():
    found = {}
    for c in (1.0, 0.1):
        model = network()
        model[1].eps = 1e-12
        with torch.no_grad():
            model[0].weight *= c
            model[0].bias *= c
        for relative in (False, True):
            found[c, relative] = largest_eigenvalue(
                model, loss, relative=relative, tolerance=1e-7
            ).value
    assert found[0.1, False] > 3 * found[1.0, False]
    assert found[0.1, True] == pytest.approx(found[1.0, True], rel=1e-5)


def contents(model):
    tensors = {**model.state_dict(), **{n: p.grad for n, p in model.named_parameters()}}
    return {n: t if t is None else t.numpy().tobytes() for n, t in tensors.items()}


@pytest.mark.parametrize("norm", ["plain", "ghost"])
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_the_model_and_its_gradients_are_restored_bit_for_bit(norm, training):
    model = network(norm).train(training)
    model[0].requires_grad_(False)
    model[5].weight.grad = torch.ones_like(model[5].weight)
    before, modes = contents(model), [m.training for m in model.modules()]
    state = torch.random.get_rng_state()
    with torch.no_grad():
        found = largest_eigenvalue(model, loss, iterations=60, tolerance=1e-7)
    assert found.value == pytest.approx(float(torch.linalg.eigvalsh(dense(model))[-1]), rel=1e-6)
    assert contents(model) == before
    assert [m.training for m in model.modules()] == modes
    assert torch.equal(torch.random.get_rng_state(), state)


def test_the_model_is_restored_after_a_loss_that_changes_buffers_and_fails():
    model = network()
    before = contents(model)

    def fail(m):
        m.train()
        loss(m)
        m[1].running_mean.add_(1)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        largest_eigenvalue(model, fail)
    assert contents(model) == before


def test_fp32_and_another_first_vector_give_the_same_to_the_tolerance():
    model = network("ghost")
    expected = largest_eigenvalue(model, loss, tolerance=1e-7).value
    other = largest_eigenvalue(model, loss, seed=1, tolerance=1e-3)
    assert other.value == pytest.approx(expected, rel=1e-3)
    single = largest_eigenvalue(
        copy.deepcopy(model).float(), lambda m: loss(lambda x: m(x.float())), tolerance=1e-3
    )
    assert single.value == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(
    ("field", "call"),
    [
        ("model", lambda: largest_eigenvalue(nn.ReLU(), loss)),
        ("loss", lambda: largest_eigenvalue(network(), lambda _: 1.0)),
        ("loss", lambda: largest_eigenvalue(network(), lambda m: loss(m).detach())),
        ("loss", lambda: largest_eigenvalue(Weights([1.0, 2.0]), lambda m: m.w)),
        ("loss", lambda: largest_eigenvalue(Weights([0.0]), lambda m: m.w.sum().sqrt())),
        ("tolerance", lambda: largest_eigenvalue(network(), loss, tolerance=0)),
        ("iterations", lambda: largest_eigenvalue(network(), loss, iterations=0)),
    ],
)
def test_bad_input_is_refused_by_name(field, call):
    with pytest.raises(InputError) as raised:
        call()
    assert raised.value.field == field
