"""The two layouts that ghost norm works on as they are; anything else is copied into one of them.

rows    channels innermost: (N, C) inputs and channels_last
planes  pixels innermost: contiguous images
"""

import torch
from torch import Tensor


def workable(x: Tensor, result: Tensor) -> tuple[Tensor, Tensor]:
    """``x`` and a place for the result, both dense and in rows or in planes."""
    if x.stride() == result.stride() and (x.is_contiguous() or in_rows(x)):
        return x, result
    if in_rows(result) or result.is_contiguous():  # x is a slice: its copy can be laid out so
        return torch.empty_like(result).copy_(x), result
    return x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)


def as_dense_as(model: Tensor, x: Tensor) -> Tensor:
    """``x``, or a copy of it, with the strides of ``model``."""
    return x if x.stride() == model.stride() else torch.empty_like(model, dtype=x.dtype).copy_(x)


def in_rows(x: Tensor) -> bool:
    """Whether the channels lie innermost."""
    if x.dim() == 4:  # as below, without a view
        return x.is_contiguous(memory_format=torch.channels_last)
    return x.movedim(1, -1).is_contiguous()
