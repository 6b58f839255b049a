"""The two layouts that backends work on; a batch in any other is copied into one of them.

rows    channels innermost: (N, C) inputs and channels_last
planes  pixels innermost: contiguous images
"""

from typing import TypeVar

import torch
from torch import Tensor, nn

PLAIN = (Tensor, nn.Parameter)
OptionalTensor = TypeVar("OptionalTensor", Tensor, Tensor | None)


def make_dense(x: Tensor, result: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``x`` and ``result``, or copies of the same shape, dense and both in rows or planes.

    ``result`` must be ``torch.empty_like(x)``; its values are not kept.
    """
    if x.stride() == result.stride() and (x.is_contiguous() or in_rows(x)):
        return x, result
    if in_rows(result) or result.is_contiguous():  # x is a slice: a copy of it has no gaps
        return torch.empty_like(result).copy_(x), result
    return x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)


def as_dense_as(like: Tensor, x: OptionalTensor) -> OptionalTensor:
    """Return ``x``; a copy if it is lazily negated or zero, or its strides are not ``like``'s."""
    if x is None:
        return x
    if x.stride() == like.stride() and not (x.is_neg() or x._is_zerotensor()):
        return x
    return torch.empty_like(like, dtype=x.dtype).copy_(x)


def in_rows(x: Tensor) -> bool:
    """Return whether the channels lie innermost."""
    if x.dim() == 4:  # as below, without a view
        return x.is_contiguous(memory_format=torch.channels_last)
    return x.movedim(1, -1).is_contiguous()


def is_readable(*tensors: Tensor | None) -> bool:
    """Return whether kernels may read the memory: plain tensors, not lazily negated or zero."""
    for t in tensors:
        if t is not None and (type(t) not in PLAIN or t.is_neg() or t._is_zerotensor()):
            return False
    return True
