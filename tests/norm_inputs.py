"""Inputs for the tests of ghost norm: values that differ between ghosts, in every layout."""

import torch
from torch import Tensor


def draw(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    """Return values whose mean and deviation drift over the batch, so that ghosts differ."""
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    drift = torch.linspace(1, 2, shape[0], dtype=torch.float64).view(-1, *(1,) * (len(shape) - 1))
    return (values * drift + drift).to(dtype)


def channels_innermost(x: Tensor) -> Tensor:
    """Lay out as channels_last, for any number of dimensions."""
    return x.movedim(1, -1).contiguous().movedim(-1, 1)


LAYOUTS = {
    "contiguous": lambda x: x.contiguous(),
    "channels innermost": channels_innermost,
    "transposed": lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),
    "every second sample": lambda x: x.repeat_interleave(2, 0)[::2],
    "every second pixel": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "half of the channels": lambda x: torch.cat([x, x], 1)[:, : x.shape[1]],
    "half of the innermost channels": lambda x: channels_innermost(torch.cat([x, x], 1))[
        :, : x.shape[1]
    ],
}
