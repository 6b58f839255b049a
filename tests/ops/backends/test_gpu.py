"""The Triton kernels as compiled for a GPU: what the interpreter cannot show."""

import nonfinite
import pytest
import torch

from ghostbatch.ops import ghost_batch_norm
from ghostbatch.ops.backends import select

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(autouse=True)
def _kernels(monkeypatch):
    """Fail instead of going on with tensor code where the kernels do not work."""
    monkeypatch.setattr(select, "_broken", set())


@nonfinite.EACH_LAYOUT
@nonfinite.EACH_CASE
def test_an_infinity_or_a_nan_is_neither_lost_nor_spreads(
    tensor, sample, bad, activation, residual, layout
):
    nonfinite.check(tensor, sample, bad, activation, residual, layout, device="cuda")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_relu_does_not_hide_an_infinite_input(dtype):
    x = torch.randn(16, 1, 8, 8, device="cuda", dtype=dtype)
    x[3, 0, 0, 0] = torch.inf
    mean, var = torch.zeros(1, device="cuda"), torch.ones(1, device="cuda")
    y = ghost_batch_norm(x, mean, var, ghost=8, activation="relu")
    assert y[:8].isnan().all()
    assert y[8:].isfinite().all()
    assert not mean.isfinite().any()
    assert var.isnan().all()
