"""Inputs for the tests of ghost norm: values that differ between ghosts, layouts, layers."""

import pytest
import torch
from torch import Tensor, nn

import ghostbatch as gb


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

EACH_LAYER = pytest.mark.parametrize(
    ("ghost_layer", "plain_layer", "shape"),
    [
        (gb.GhostBatchNorm1d, nn.BatchNorm1d, (3,)),
        (gb.GhostBatchNorm1d, nn.BatchNorm1d, (3, 4)),
        (gb.GhostBatchNorm2d, nn.BatchNorm2d, (3, 2, 2)),
        (gb.GhostBatchNorm3d, nn.BatchNorm3d, (3, 2, 2, 2)),
    ],
    ids=["1d", "1d with length", "2d", "3d"],
)
"""Each ghost layer, PyTorch's layer, and the shape of a sample with 3 channels."""
