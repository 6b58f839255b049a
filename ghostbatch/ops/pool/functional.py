"""Pooling functions that select the kernels where they apply, and PyTorch elsewhere."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ghostbatch.ops.backends.base import has_triton, is_traced


def max_pool2d(x: Tensor, kernel: int) -> Tensor:
    """Return ``F.max_pool2d(x, kernel, stride=2)``, by kernels for 2 and 3 pixels where they apply.

    They take dense channels_last batches on an NVIDIA GPU. Values, NaN and ties are those of
    PyTorch. Only the gradient of a window that holds a NaN may go to another of its pixels.
    """
    if _kernels_apply(x, kernel):
        from ghostbatch.ops.pool.launch import MaxPool  # noqa: PLC0415 (imports triton)

        return MaxPool.apply(x, kernel)  # type: ignore[no-any-return, no-untyped-call]
    return F.max_pool2d(x, kernel, 2)


def mean_pool2d(x: Tensor) -> Tensor:
    """Return the mean over all pixels, (N, C, 1, 1), with a gradient laid out as ``x``."""
    if is_traced() or not x.is_contiguous(memory_format=torch.channels_last):
        return F.adaptive_avg_pool2d(x, 1)
    return MeanPool.apply(x)  # type: ignore[no-any-return, no-untyped-call]


def _kernels_apply(x: Tensor, kernel: int) -> bool:
    return (
        has_triton(x)
        and kernel in (2, 3)
        and x.dim() == 4
        and min(x.shape[2:]) >= kernel
        and x.numel() > 0
        and x.is_contiguous(memory_format=torch.channels_last)
    )


class MeanPool(torch.autograd.Function):
    """The mean over all pixels of a channels_last batch.

    PyTorch's gradient is expanded, or laid out otherwise, so the layer before has to copy it.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """From (N, C, H, W) to (N, C, 1, 1)."""
        ctx.shape = x.shape
        N, C, H, W = x.shape
        return x.permute(0, 2, 3, 1).reshape(N, H * W, C).mean(1).view(N, C, 1, 1)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        """Spread the gradient over the pixels."""
        N, C, H, W = ctx.shape
        rows: Tensor = (dy / (H * W)).permute(0, 2, 3, 1).expand(N, H, W, C)
        return rows.contiguous().permute(0, 3, 1, 2)
