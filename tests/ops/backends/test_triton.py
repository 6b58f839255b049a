"""The Triton kernels, in Triton's interpreter, against the reference.

The interpreter runs programs one after the other, so nothing here ever waits for another program.
"""

import copy
from dataclasses import replace
from functools import partial

import norm_inputs
import pytest
import torch
from norm_inputs import LAYOUTS
from torch import Tensor
from torch.testing import assert_close

import ghostbatch as gb
from ghostbatch.ops import ghost_batch_norm, ghost_batch_norm_reference
from ghostbatch.ops.backends import select
from ghostbatch.ops.backends.base import NormCall
from ghostbatch.ops.backends.tensor import TensorBackend
from ghostbatch.ops.backends.triton import launch
from ghostbatch.ops.backends.triton.tiling import Tuning
from ghostbatch.ops.running.stats import RunningStats
from ghostbatch.ops.running.update import apply_contributions, contribution

pytestmark = pytest.mark.usefixtures("interpreted")
draw = partial(norm_inputs.draw, dtype=torch.float32)

SMALL = Tuning(warps=1, vectors=2, subtiles=2, channels=16, programs=2)
TOLERANCE = {
    torch.float32: {"rtol": 2e-5, "atol": 2e-5},
    torch.float16: {"rtol": 2**-10, "atol": 2e-4},
    torch.bfloat16: {"rtol": 2**-7, "atol": 2e-4},  # the interpreter rounds to within one ulp
}


def outcome(norm, x, dy, weight, bias, residual, wide: bool, **options) -> list[Tensor]:
    """The result, all gradients and the running statistics."""
    tensors = [x, weight, bias, residual]
    if wide:
        dy, *tensors = (None if t is None else t.double() for t in (dy, *tensors))
    tensors = [None if t is None else t.detach().requires_grad_() for t in tensors]
    x, weight, bias, residual = tensors
    kept = [torch.zeros(x.shape[1]), torch.ones(x.shape[1])]
    y = norm(x, *kept, weight, bias, residual=residual, eps=1e-2, **options)
    grads = torch.autograd.grad(y, [t for t in tensors if t is not None], dy)
    return [y.detach(), *grads, *kept]


def check(shape, ghost, dtype, layout, *, affine=True, residual=False, activation=None):
    x = LAYOUTS[layout](draw(*shape, dtype=dtype))
    dy = LAYOUTS[layout](draw(*shape, dtype=dtype, seed=1))
    weight, bias = (draw(shape[1], seed=2), draw(shape[1], seed=3)) if affine else (None, None)
    added = LAYOUTS[layout](draw(*shape, dtype=dtype, seed=4)) if residual else None
    options = {"ghost": ghost, "activation": activation}
    if activation:  # where ReLU's input is near 0, rounding decides on the mask: no gradient there
        exact = ghost_batch_norm_reference(
            *(x.double(), None, None), *(p if p is None else p.double() for p in (weight, bias)),
            ghost=ghost, eps=1e-2, residual=None if added is None else added.double(),
        )  # fmt: skip
        dy = torch.where(exact.abs() > 1e-4, dy, 0)
    fast = outcome(ghost_batch_norm, x, dy, weight, bias, added, False, **options)
    slow = outcome(ghost_batch_norm_reference, x, dy, weight, bias, added, True, **options)
    for result, right in zip(fast, slow, strict=True):
        tolerance = TOLERANCE[result.dtype]
        assert_close(result, right, **tolerance, check_dtype=False, check_stride=False)
    assert fast[0].dtype == fast[1].dtype == dtype
    assert fast[0].stride() == fast[1].stride() == torch.empty_like(x).stride()


# --------------------------------------------------------------------------- against the reference


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "channels innermost"])
@pytest.mark.parametrize(
    ("shape", "ghost"),
    [
        ((8, 16, 4, 4), 4),  # tiles that fill exactly
        ((9, 3, 5), 4),  # a larger last ghost, and sizes that no tile divides
        ((7, 5, 3, 3), 4),  # a smaller last ghost
        ((5, 2, 2, 2), 8),  # a batch smaller than a ghost
        ((12, 40, 2), 6),  # more channels than a block
        *(((13, 20), 6), ((16, 48), 6), ((6, 3), 6), ((7, 3), 2)),  # matrices
    ],
    ids=str,
)
def test_results_gradients_and_statistics_are_right(shape, ghost, layout, dtype, launches):
    check(shape, ghost, dtype, layout)
    assert len(launches) >= 2


@pytest.mark.parametrize("layout", ["every second sample", "transposed"])
def test_other_layouts_are_copied_first_and_kept(layout):
    check((9, 3, 2, 4), 4, torch.float32, layout, activation="relu", residual=True)


@pytest.mark.parametrize("layout", ["contiguous", "channels innermost"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("affine", [True, False], ids=["affine", "not affine"])
@pytest.mark.parametrize(
    "fused_with",
    [{"activation": "relu"}, {"residual": True}, {"activation": "relu", "residual": True}, {}],
    ids=str,
)
def test_fused_forms_equal_the_references(fused_with, affine, dtype, layout):
    check((9, 4, 3, 3), 4, dtype, layout, affine=affine, **fused_with)


@pytest.mark.parametrize(
    "settings",
    [
        replace(SMALL, programs=0, lookahead=0),
        replace(SMALL, programs=1, lookahead=3),
        replace(SMALL, vectors=1, subtiles=1, fan=2),  # sums are added up in two steps
        replace(SMALL, warps=2, vectors=1, subtiles=1, channels=1, stream=0),
        replace(SMALL, vectors=8, subtiles=8, channels=4, stream=2),
        Tuning(),
    ],
    ids=str,
)
@pytest.mark.parametrize("layout", ["contiguous", "channels innermost"])
def test_settings_change_no_result(settings, layout, monkeypatch):
    monkeypatch.setattr(launch, "tuning", lambda *_: settings)
    check((10, 6, 4, 4), 4, torch.float32, layout, activation="relu")


@pytest.mark.parametrize("layout", ["contiguous", "channels innermost"])
def test_a_mean_of_1e4_leaves_three_digits_of_a_unit_variance(layout):
    x = draw(64, 4, 4, 4)
    x = LAYOUTS[layout]((x - x.mean()) / x.std() + 1e4)
    y, table = launch.TritonBackend().forward(NormCall(x, None, None, 32, 1e-5))
    exact, right = TensorBackend().forward(NormCall(x.double(), None, None, 32, 1e-5))
    assert_close(table[0].double(), right[0], rtol=1e-6, atol=0)
    assert_close(table[2].double(), right[2], rtol=5e-4, atol=0)
    assert_close(y.double(), exact, rtol=0, atol=1.1e-2)


def test_the_same_input_gives_the_same_bits():
    x, dy = draw(12, 5, 4, 4), draw(12, 5, 4, 4, seed=1)
    runs = []
    for _ in range(2):
        call, triton = NormCall(x, None, None, 4, 1e-5, "relu"), launch.TritonBackend()
        y, table = triton.forward(call)
        runs.append([y, table, *triton.backward(call, table, dy)])
    assert_close(runs[0], runs[1], rtol=0, atol=0)


@pytest.mark.parametrize("momentum", [0.1, 0.0, 1.0, None])
@pytest.mark.parametrize("running", ["sequential", "mean"])
@pytest.mark.parametrize("tracked", [torch.tensor(3), None], ids=str)
def test_running_statistics_are_updated_as_in_the_reference(momentum, running, tracked):
    if momentum is None and tracked is None:
        pytest.skip("refused")
    x, found = draw(21, 40), []
    for norm in (ghost_batch_norm, ghost_batch_norm_reference):
        kept = [draw(40, seed=1), draw(40, seed=2).square(), copy.deepcopy(tracked)]
        versions = [t._version for t in kept[:2]]
        options = {"momentum": momentum, "running": running, "num_batches_tracked": kept[2]}
        norm(x, *kept[:2], ghost=3, **options)
        found.append([t for t in kept if t is not None])
        assert [t._version > v for t, v in zip(kept[:2], versions, strict=True)] == [True, True]
    assert_close(found[0], found[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("with_residual", [True, False])
def test_second_derivatives_are_those_of_the_reference(with_residual):
    found = []
    for norm in (ghost_batch_norm, ghost_batch_norm_reference):
        x, residual = (draw(6, 2, 2, 2, seed=s).requires_grad_() for s in (0, 1))
        y = norm(x, ghost=3, activation="relu", residual=residual if with_residual else None)
        leaves = [x, residual] if with_residual else [x]
        grads = torch.autograd.grad(y.pow(3).sum(), leaves, create_graph=True)
        found.append([*grads, *torch.autograd.grad(sum(g.pow(2).sum() for g in grads), leaves)])
    assert_close(found[0], found[1], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("programs", [0, 2])
def test_a_kernel_can_use_its_counters_again_without_clearing_them(programs, monkeypatch):
    """The kernels of a CUDA graph do so: their counters are cleared only once."""
    settings = replace(SMALL, vectors=1, subtiles=1, fan=2, programs=programs)  # in two steps
    monkeypatch.setattr(launch, "tuning", lambda *_: settings)
    kept, calls = {}, []

    def same_each_round(device, count):
        calls.append(count)
        return kept.setdefault(len(calls) % 2, torch.zeros(count, dtype=torch.int64, device=device))

    monkeypatch.setattr(launch, "counters", same_each_round)
    x, dy = draw(11, 5, 3, 3), draw(11, 5, 3, 3, seed=1)
    weight, bias = torch.rand(5), torch.rand(5)
    rounds = [
        outcome(ghost_batch_norm, x, dy, weight, bias, None, wide=False, ghost=4) for _ in range(4)
    ]
    assert len(calls) == 8
    assert all(int(counter[0]) > 0 for counter in kept.values())
    for again in rounds[1:]:
        assert_close(again, rounds[0], rtol=0, atol=0)


@pytest.mark.parametrize("running", ["sequential", "mean"])
@pytest.mark.parametrize("momentum", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("shape", [(2, 1, 3), (2, 70, 33)], ids=str)
def test_the_kernel_of_running_statistics_gives_the_closed_form(running, momentum, shape):
    """Compiled code updates them with an operator, which launches this kernel."""
    moments = draw(*shape)
    found = []
    for by_kernel in (True, False):
        mean, var, tracked = torch.full((shape[2],), 3.0), torch.ones(shape[2]), torch.tensor(5)
        stats = RunningStats(mean, var, tracked, momentum, running)
        if by_kernel:
            assert select.update_by_kernel(stats, moments)
        else:
            apply_contributions(stats, [contribution(stats, moments)])
        found.append([mean, var, tracked])
    assert_close(found[0], found[1])


def test_a_training_step_is_two_kernels_and_updates_the_running_statistics(launches):
    layer = gb.GhostBatchNorm2d(4, ghost=3)
    layer(draw(6, 4, 2, 2).requires_grad_()).sum().backward()
    assert [kernel.__name__ for kernel in launches] == ["forward_kernel", "backward_kernel"]
    assert int(layer.num_batches_tracked) == 2
    assert layer.running_mean.abs().min() > 0
