"""One wave of ghosts at a time: as many as fit the cache together. See `plain` for the shapes."""

from typing import NamedTuple

import torch
from torch import Tensor


class Statistics(NamedTuple):
    """Per ghost and channel, (K, C), in fp32 or better: the parts of one (3, K, C) tensor."""

    mean: Tensor
    invstd: Tensor
    """1 / sqrt(biased variance + eps)."""
    variance: Tensor
    """Unbiased, for the running statistics."""


def forward_wave(
    x: Tensor,
    y: Tensor,
    centred: Tensor,
    part: Statistics,
    scale: Tensor,
    shift: Tensor,
    eps: float,
) -> None:
    """Mean, then the variance about it, then the result: three passes over a wave in the cache."""
    count = x[0].numel() // part.mean.shape[1]
    torch.div(sum_over(x, part.mean.dtype), count, out=part.mean)
    torch.sub(x, spread(part.mean, x), out=centred)
    squares = torch.mul(centred, centred, out=y if y.dtype == centred.dtype else None)
    variance = sum_over(squares, part.mean.dtype).div_(count)
    torch.mul(variance, count / (count - 1), out=part.variance)
    torch.rsqrt(variance.add_(eps), out=part.invstd)
    slope, level = spread(scale * part.invstd, x), spread(shift.unsqueeze(0), x)
    affine(centred, slope, level, out=y)


def backward_wave(
    centred: Tensor,
    x: Tensor,
    dy: Tensor,
    dx: Tensor,
    mean: Tensor,
    invstd: Tensor,
    gain: Tensor,
    dot: Tensor,
    total: Tensor,
) -> None:
    """The sums ``dot`` of dy xhat and ``total`` of dy; then dx, a multiple of x plus one of dy."""
    count = x[0].numel() // mean.shape[1]
    torch.sub(x, spread(mean, x), out=centred)
    products = torch.mul(centred, dy, out=dx if dx.dtype == centred.dtype else None)
    torch.mul(sum_over(products, mean.dtype), invstd, out=dot)
    total.copy_(sum_over(dy, mean.dtype))
    slope, level = (gain * invstd).mul_(dot).div_(-count), (gain * total).div_(-count)
    wide = dx if dx.dtype == centred.dtype else centred
    affine(centred, spread(slope, x), spread(level, x), out=wide)
    wide.addcmul_(dy, spread(gain, x))
    if wide is not dx:
        dx.copy_(wide)


def room_for(x: Tensor, room: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Scratch space shaped as ``x``: that of the wave before, still in the cache, if it fits."""
    if room is not None and room.shape[1:] == x.shape[1:] and len(room) >= len(x):
        return room[: len(x)]
    return torch.empty_like(x, dtype=dtype)


def affine(x: Tensor, slope: Tensor, level: Tensor, out: Tensor) -> None:
    """``out = x slope + level``, spread over ``x``, rounded once, as fast as that allows."""
    if slope.shape[-1] > 1 or out.dtype != x.dtype:  # one slope for a whole plane is quicker in two
        torch.addcmul(level, x, slope, out=out)
    else:
        torch.mul(x, slope, out=out).add_(level)


def sum_over(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Over a ghost: (K, C)."""
    return x.sum(1, dtype=dtype) if x.dim() == 3 else x.sum((1, 3), dtype=dtype)


def spread(values_KC: Tensor, like: Tensor) -> Tensor:
    """Make (K, C) broadcast over rows or planes."""
    return values_KC.unsqueeze(1) if like.dim() == 3 else values_KC[:, None, :, None]
