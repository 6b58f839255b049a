"""The results of the C kernels as shipped; test_ghost_norm tests what all backends share."""

import pytest
import torch
from norm_inputs import draw
from torch.testing import assert_close
from torch.testing._internal.two_tensor import TwoTensor

from ghostbatch.ops import ghost_batch_norm, ghost_batch_norm_reference
from ghostbatch.ops.backends.base import NormCall
from ghostbatch.ops.backends.c.bind import CBackend

pytestmark = pytest.mark.usefixtures("compiler")
KINDS = [torch.contiguous_format, torch.channels_last]
C = CBackend()


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize(
    ("shape", "ghost"),
    [
        ((70, 33, 16, 16), 16),  # small ghosts: whole ones, and some left over
        ((70, 65, 17, 15), 32),  # large ones, worked on by all threads
        ((5, 3, 64, 300), 8),  # one ghost; planes longer than a chain of additions
        ((200, 1, 2, 3), 64),
    ],
    ids=str,
)
def test_batches_of_real_size_equal_the_reference_for_any_number_of_threads(
    shape, ghost, kind, threads
):
    torch.set_num_threads(threads)
    x, dy = (draw(*shape, seed=s).contiguous(memory_format=kind) for s in (0, 1))
    weight, bias = draw(shape[1], seed=2), draw(shape[1], seed=3)
    found = []
    for norm in (ghost_batch_norm, ghost_batch_norm_reference):
        leaves = [t.clone().requires_grad_() for t in (x, weight, bias)]
        kept, tracked = [draw(shape[1], seed=4), draw(shape[1], seed=5)], torch.tensor(7)
        y = norm(leaves[0], *kept, *leaves[1:], ghost=ghost, num_batches_tracked=tracked)
        found.append([y.detach(), *torch.autograd.grad(y, leaves, dy), *kept, tracked])
    assert_close(found[0], found[1], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_the_same_call_gives_the_same_bits(kind):
    torch.set_num_threads(3)
    x = draw(130, 40, 9, 9, dtype=torch.float32).contiguous(memory_format=kind)
    call = NormCall(x, None, None, 32, 1e-5)
    found = [C.forward(call) for _ in range(5)]
    for y, table in found[1:]:
        assert torch.equal(y, found[0][0])
        assert torch.equal(table, found[0][1])
    table = found[0][1]
    gradients = [C.backward(call, table, x.square())[:2] for _ in range(5)]
    assert all(
        torch.equal(a, b) for g in gradients[1:] for a, b in zip(g, gradients[0], strict=True)
    )


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_first_values_far_from_the_others_keep_the_variance_accurate(kind):
    """Squares are summed about the mean of the first few values."""
    x = draw(128, 4, 16, 16, dtype=torch.float32)
    x[:4] += 1e6
    x = x.contiguous(memory_format=kind)
    _, table = C.forward(NormCall(x, None, None, 128, 1e-5))
    exact = x.double().transpose(0, 1).flatten(1).var(1)
    assert_close(table[2, 0].double(), exact, rtol=1e-4, atol=0)


def test_bfloat16_rounds_to_nearest_even_and_keeps_nans():
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    x = bits.view(torch.bfloat16)  # every bfloat16
    x = torch.stack([x, x.flip(0)], 1)[:, :, None]
    weight = torch.tensor([1.7, -0.3])
    # One ghost of two samples: y = +-weight, or NaN; the residual makes it anything.
    pairs = x.unfold(0, 2, 2).movedim(-1, 1).flatten(0, 1)
    y, _ = C.forward(NormCall(torch.ones_like(pairs), weight, None, 2, 1e-5, residual=pairs))
    assert torch.equal(y.isnan(), pairs.isnan())
    assert_close(y, pairs, rtol=0, atol=0, equal_nan=True)  # the norm of ones is 0
    odd, even = 1 + 2**-8, 1 + 3 * 2**-8  # between two numbers
    bias = torch.tensor([odd, even])
    y, _ = C.forward(NormCall(torch.ones(4, 2, dtype=torch.bfloat16), None, bias, 4, 1e-5))
    assert y[0].tolist() == [1.0, 1 + 2**-6]


def test_bfloat16_keeps_a_nan_whose_bits_would_round_to_a_number():
    bias = torch.tensor([0x7FFFFFFF], dtype=torch.int32).view(torch.float32)
    y, _ = C.forward(NormCall(torch.ones(4, 1, dtype=torch.bfloat16), None, bias, 4, 1e-5))
    assert y.isnan().all()


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_constant_channel_has_no_negative_variance(kind):
    constants = torch.linspace(0.1, 1e4, 500).view(1, 500, 1, 1)
    x = constants.expand(7 * 128, 500, 1, 3).contiguous(memory_format=kind)
    y, table = C.forward(NormCall(x, None, None, 7 * 128, 1e-30))
    assert (table[2] >= 0).all()
    assert y.isfinite().all()


def test_an_infinite_variance_leaves_no_gradient():
    x = draw(64, 3, dtype=torch.float32) * 1e30
    call = NormCall(x, None, None, 64, 1e-5)
    _, table = C.forward(call)
    dx, (dweight, _), _ = C.backward(call, table, torch.full_like(x, 1e15))
    assert table[1].abs().max() == 0
    assert dweight.abs().max() == 0
    assert dx.abs().max() == 0


def test_autograd_knows_that_running_statistics_were_updated():
    """It then refuses to differentiate what was computed from them before."""
    mean, var, tracked = draw(3), draw(3).square(), torch.tensor(0)
    before = [t._version for t in (mean, var, tracked)]
    ghost_batch_norm(draw(8, 3), mean, var, ghost=4, num_batches_tracked=tracked)
    assert [t._version for t in (mean, var, tracked)] == [version + 1 for version in before]


@pytest.mark.parametrize("odd", ["parameters", "statistics", "count"])
def test_tensors_with_gaps_or_another_dtype_give_the_results_of_the_reference(odd):
    x, dy = draw(40, 3, 2), draw(40, 3, 2, seed=1)
    found = []
    for norm in (ghost_batch_norm, ghost_batch_norm_reference):
        mean, var, weight, bias = (
            draw(6, seed=seed)[::2] if of == odd else draw(3, seed=seed)  # with gaps
            for seed, of in enumerate(("statistics", "statistics", "parameters", "parameters"))
        )
        leaves = [t.requires_grad_() for t in (x.clone(), weight, bias)]
        counts = torch.tensor([-3, 7], dtype=torch.int32 if odd == "count" else torch.long)
        y = norm(leaves[0], mean, var, *leaves[1:], ghost=8, num_batches_tracked=counts[0])
        found.append([y, *torch.autograd.grad(y, leaves, dy), mean, var, counts])
    assert_close(found[0], found[1])


def test_lazily_negated_and_zero_tensors_and_subclasses_give_the_right_results():
    x = draw(8, 3, 2)
    negated = torch.complex(draw(8, 3, 2, seed=1), -x).conj().imag
    assert negated.is_neg()
    expected = ghost_batch_norm_reference(x, ghost=4)
    assert_close(ghost_batch_norm(negated, ghost=4), expected)
    leaf = x.clone().requires_grad_()
    (zero,) = torch.autograd.grad(
        ghost_batch_norm(leaf, ghost=4), leaf, torch._efficientzerotensor(x.shape, dtype=x.dtype)
    )
    assert zero.abs().max() == 0
    pair = TwoTensor(draw(3, seed=2), draw(3, seed=2))
    y = ghost_batch_norm(x, None, None, pair, ghost=4)
    assert_close(getattr(y, "a", y), ghost_batch_norm_reference(x, None, None, pair.a, ghost=4))
