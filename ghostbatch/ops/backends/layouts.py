"""The two layouts that backends work on; a batch in any other is copied into one of them.

rows    channels innermost: (N, C) inputs and channels_last
planes  pixels innermost: contiguous images
"""

from typing import TypeVar

import torch
from torch import Tensor, nn

OptionalTensor = TypeVar("OptionalTensor", Tensor, Tensor | None)


def make_dense(x: Tensor, result: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``x`` and ``result``, or copies of the same shape, dense and both in rows or planes.

    ``result`` is as `torch.empty_like` makes it from ``x``, and not written yet.
    """
    if x.stride() == result.stride() and (x.is_contiguous() or in_rows(x)):
        return x, result
    if in_rows(result) or result.is_contiguous():  # x is a slice: a copy of it has no gaps
        return torch.empty_like(result).copy_(x), result
    return x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)


def as_dense_as(model: Tensor, x: OptionalTensor) -> OptionalTensor:
    """Return ``x``, or a copy of it, with the strides of ``model``, as its memory reads."""
    if x is None or (x.stride() == model.stride() and not _is_lazy(x)):
        return x
    return torch.empty_like(model, dtype=x.dtype).copy_(x)


def in_rows(x: Tensor) -> bool:
    """Whether the channels lie innermost."""
    if x.dim() == 4:  # as below, without a view
        return x.is_contiguous(memory_format=torch.channels_last)
    return x.movedim(1, -1).is_contiguous()


def is_readable(*tensors: Tensor | None) -> bool:
    """Whether a kernel may read the tensors' memory: no subclasses, no lazy views."""
    return all(
        t is None or (type(t) in (Tensor, nn.Parameter) and not _is_lazy(t)) for t in tensors
    )


def _is_lazy(x: Tensor) -> bool:
    """Whether ``x`` is to be negated, or is zero, though its memory says otherwise."""
    return x.is_neg() or x._is_zerotensor()
