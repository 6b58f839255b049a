"""An infinity or a NaN in the input or the gradient stays one wherever the reference has one."""

import nonfinite
import numpy as np
import pytest
import torch
from norm_inputs import LAYOUTS, draw
from torch.testing import assert_close

from ghostbatch.ops.backends import select
from ghostbatch.ops.backends.base import NormCall


@pytest.fixture
def maximum_drops_nan(interpreted, monkeypatch):
    """Make Triton's interpreter take the number of a number and a NaN, as NVIDIA's GPUs do."""
    del interpreted
    from triton.runtime.interpreter import InterpreterBuilder  # noqa: PLC0415

    def fmax(self, left, right):
        return self.binary_op(left, right, np.fmax)

    monkeypatch.setattr(InterpreterBuilder, "create_maxnumf", fmax)


@pytest.mark.usefixtures("backend")
@nonfinite.EACH_LAYOUT
@nonfinite.EACH_CASE
def test_one_is_neither_lost_nor_spreads_in_c_and_tensor_code(
    tensor, sample, bad, activation, residual, layout
):
    nonfinite.check(tensor, sample, bad, activation, residual, layout)


@pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")
@pytest.mark.usefixtures("maximum_drops_nan")
@nonfinite.EACH_LAYOUT
@nonfinite.EACH_CASE
def test_one_is_neither_lost_nor_spreads_in_triton(
    tensor, sample, bad, activation, residual, layout
):
    nonfinite.check(tensor, sample, bad, activation, residual, layout)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("bad", [torch.inf, torch.nan], ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "channels innermost"])
def test_a_bad_gradient_is_kept_where_the_variance_overflows(bad, layout):
    """There 1/std is 0, which must not hide it from the gradient of the weight."""
    x, dy = (LAYOUTS[layout](draw(8, 2, 3, 3, dtype=torch.float32, seed=s)) for s in (0, 1))
    dy[1, 0, 0, 0] = bad
    call = NormCall(x * 1e30, None, None, 4, 1e-5)
    backend = select.select(call)
    _, statistics = backend.forward(call)
    dx, (dweight, dbias), _ = backend.backward(call, statistics, dy)
    assert statistics[1].abs().max() == 0
    assert not dweight[0].isfinite()
    assert not dbias[0].isfinite()
    assert not dx[:4, 0].isfinite().any()
    assert_close(dweight[1], torch.tensor(0.0))
