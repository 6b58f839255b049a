"""Ghost norm of inputs that are hard on floating-point arithmetic, and of large ghosts."""

import pytest
import torch
from norm_inputs import LAYOUTS, draw
from torch.testing import assert_close

from ghostbatch.ops import ghost_batch_norm, ghost_batch_norm_reference
from ghostbatch.ops.backends import select


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("layout", ["contiguous", "channels innermost"])
@pytest.mark.parametrize("shape", [(256, 4, 4, 4), (256, 8, 32, 32)], ids=str)
def test_a_mean_of_1e4_leaves_three_digits_of_a_unit_variance(layout, shape):
    ghost = shape[0] // 2
    x, dy = draw(*shape, dtype=torch.float32, seed=1), draw(*shape, dtype=torch.float32, seed=2)
    x = LAYOUTS[layout]((x - x.mean()) / x.std() + 1e4).requires_grad_()
    mean, var = torch.zeros(2, shape[1])
    y = ghost_batch_norm(x, mean, var, ghost=ghost, momentum=1.0)
    (dx,) = torch.autograd.grad(y, x, dy)

    wide = x.detach().double().requires_grad_()
    exact = ghost_batch_norm_reference(wide, ghost=ghost)
    (exact_dx,) = torch.autograd.grad(exact, wide, dy.double())
    last = wide[ghost:].transpose(0, 1).flatten(1)
    assert_close(mean.double(), last.mean(1), rtol=1e-6, atol=0)
    assert_close(var.double(), last.var(1), rtol=5e-4, atol=0)
    assert_close(y.double(), exact, rtol=0, atol=1.1e-2)  # the mean, to 1e-6, is 1e-2 deviations
    assert_close(dx.double(), exact_dx, rtol=0, atol=1e-2 * float(exact_dx.abs().max()))


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("layout", ["contiguous", "channels innermost"])
def test_at_a_mean_of_1e6_the_result_is_off_by_no_more_than_the_rounding_of_the_mean(layout):
    x = LAYOUTS[layout](draw(4096, 2, 4, 4, dtype=torch.float32) + 1e6)
    exact = ghost_batch_norm_reference(x.double(), ghost=2048)
    smallest = min(ghost.std().item() for ghost in x.double().split(2048))
    half_a_unit = 2.0**-5  # in the last place of an fp32 mean between 2^19 and 2^20
    error = (ghost_batch_norm(x, ghost=2048).double() - exact).abs().max().item()
    assert error <= 1.01 * half_a_unit / smallest


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("layout", ["contiguous", "channels innermost"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_summed_in_fp32_both_ways(dtype, layout):
    # fp16 ends at 65504, which the sums and the squares all exceed; bf16 has three digits.
    x = LAYOUTS[layout](500 + 8 * draw(512, 2, 4, 4)).to(dtype)
    mean, var = torch.zeros(2, 2)
    leaves = [torch.ones(2, requires_grad=True), torch.zeros(2, requires_grad=True)]
    y = ghost_batch_norm(x, mean, var, *leaves, ghost=256, momentum=1.0)
    dweight, dbias = torch.autograd.grad(y, leaves, torch.full_like(y, 64))
    last = x[256:].double().transpose(0, 1).flatten(1)
    assert_close(mean.double(), last.mean(1), rtol=1e-6, atol=0)
    assert_close(var.double(), last.var(1), rtol=1e-5, atol=0)
    assert dbias.tolist() == [64 * 512 * 16] * 2
    assert_close(dweight, torch.zeros(2), rtol=0, atol=64 * 512 * 16 * 1e-5)


# ------------------------------------------------------------------------- large ghosts on a CPU


LARGE = (256, 128, 4, 4)  # two ghosts of 2^18 values


@pytest.fixture(params=["1", "0"], ids=["C", "tensor code"])
def shipped(request, monkeypatch):
    """Run the C kernels, and the code for those who have no compiler, as shipped."""
    monkeypatch.setenv(select.SWITCH, request.param)


@pytest.mark.usefixtures("shipped")
@pytest.mark.parametrize("kind", [torch.contiguous_format, torch.channels_last], ids=str)
def test_a_large_ghost_with_an_infinite_variance_has_no_gradient(kind):
    x = (draw(*LARGE, dtype=torch.float32) * 1e30).contiguous(memory_format=kind).requires_grad_()
    weight = torch.ones(128, requires_grad=True)
    y = ghost_batch_norm(x, None, None, weight, ghost=128)
    dx, dweight = torch.autograd.grad(y, [x, weight], torch.ones_like(y))
    assert dweight.abs().max() == 0
    assert dx.isfinite().all()


@pytest.mark.usefixtures("shipped")
def test_a_nan_in_one_channel_leaves_a_channel_with_a_far_mean_accurate():
    x = torch.randn(128, 4, 64, 64, generator=torch.Generator().manual_seed(0)) + 1e4
    x = x.contiguous(memory_format=torch.channels_last)
    x[0, 0, 0, 0] = torch.nan
    y = ghost_batch_norm(x, ghost=128)
    assert y[:, 1].std().item() == pytest.approx(1, rel=1e-2)
    assert y[:, 0].isnan().all()
