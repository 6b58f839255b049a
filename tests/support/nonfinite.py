"""Ghost norm of a batch with one infinity or NaN, compared with the reference.

A divergence is noticed by values that are not finite, so a backend must not turn them into numbers.
"""

from collections.abc import Callable

import pytest
import torch
from norm_inputs import LAYOUTS, draw
from torch import Tensor
from torch.testing import assert_close

from ghostbatch.ops import ghost_batch_norm, ghost_batch_norm_reference

PLACES = [
    ("x", 4, torch.inf),  # the first sample of its ghost
    ("x", 6, -torch.inf),
    ("x", 6, torch.nan),
    ("dy", 6, torch.inf),  # where ReLU lets it pass
    ("dy", 6, torch.nan),
    ("residual", 6, torch.inf),
    ("residual", 6, torch.nan),
]
FORMS = [(None, False), ("relu", False), ("relu", True)]
EACH_CASE = pytest.mark.parametrize(
    ("tensor", "sample", "bad", "activation", "residual"),
    [(*place, *form) for place in PLACES for form in FORMS if form[1] or place[0] != "residual"],
    ids=str,
)
EACH_LAYOUT = pytest.mark.parametrize("layout", ["contiguous", "channels innermost"])


def check(
    tensor: str, sample: int, bad: float, activation: str | None, residual: bool, layout: str,
    device: str = "cpu",
) -> None:  # fmt: skip
    """Compare the result, all gradients and the running statistics with those of the reference."""
    tensors = {name: draw(9, 3, 2, 2, seed=s) for s, name in enumerate(("x", "dy", "residual"))}
    tensors[tensor][sample, 1, 0, 0] = bad
    if not residual:
        tensors["residual"] = None
    found, exact = (
        _outcome(norm, tensors, dtype, LAYOUTS[layout], activation, where)
        for norm, dtype, where in (
            (ghost_batch_norm, torch.float32, device),
            (ghost_batch_norm_reference, torch.float64, "cpu"),
        )
    )
    assert any(not values.isfinite().all() for values in exact)
    for result, right in zip(found, exact, strict=True):
        values, finite = result.cpu().double(), right.isfinite()
        assert torch.equal(values.isfinite(), finite)
        assert_close(values[finite], right[finite], rtol=1e-4, atol=1e-4)


def _outcome(
    norm: Callable[..., Tensor],
    tensors: dict[str, Tensor | None],
    dtype: torch.dtype,
    lay_out: Callable[[Tensor], Tensor],
    activation: str | None,
    device: str,
) -> list[Tensor]:
    x, dy, residual = (
        None if t is None else lay_out(t.to(device, dtype)).requires_grad_()
        for t in tensors.values()
    )
    weight, bias, mean, var = (draw(3, seed=s).to(device, dtype) for s in (3, 4, 5, 6))
    leaves = [t.requires_grad_() for t in (x, weight, bias, residual) if t is not None]
    options = {"ghost": 4, "activation": activation, "residual": residual}
    y = norm(x, mean, var, weight, bias, **options)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy.detach()), mean, var]
