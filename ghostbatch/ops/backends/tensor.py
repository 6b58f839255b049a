"""Ghost norm in tensor code, for any device and dtype.

Shapes: K ghosts, G samples of a ghost, C channels, S pixels, R = G S rows. A piece of the batch is
viewed as (K, R, C) if the batch is in rows, as (K, G, C, S) if it is in planes.
"""

from collections.abc import Iterator
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from ghostbatch.ops.backends.base import Backend, Backward, NormCall
from ghostbatch.ops.backends.layouts import in_rows
from ghostbatch.ops.reference import ghost_sizes
from ghostbatch.ops.running.stats import RunningStats

GHOST_BY_GHOST = ("cpu",)
"""Devices where a piece is one ghost, which fits the cache; elsewhere it is all of one size."""


class TensorBackend(Backend):
    """A few tensor operations on each piece of a batch."""

    name = "tensor code"
    recomputes_relu_mask = False

    def available(self, device: torch.device, dtype: torch.dtype, interpret: bool) -> bool:
        """Return True: it runs everywhere."""
        del device, dtype, interpret
        return True

    def normalise(
        self, call: NormCall, y: Tensor, statistics: Tensor, running: RunningStats | None
    ) -> None:
        """As `Backend.normalise`: mean, variance about the mean, result."""
        del running  # left to the caller
        weight, bias = _parameters(call, statistics)
        room = None
        for (mean, invstd, variance), x, out, residual in _pieces(
            call, statistics, call.x, y, call.residual
        ):
            count = x[0].numel() // len(weight)
            torch.div(_sum(x, mean.dtype), count, out=mean)
            centred = room = _centred(x, mean, room)
            exact = out.dtype == centred.dtype
            squares = torch.mul(centred, centred, out=out if exact else None)
            torch.div(_sum(squares, mean.dtype), count, out=variance)
            torch.rsqrt(variance + call.eps, out=invstd)
            variance.mul_(count / (count - 1))
            result = torch.mul(centred, _spread(weight * invstd, x), out=out if exact else centred)
            result.add_(_spread(bias[None], x))
            if residual is not None:
                result.add_(residual)
            if call.activation == "relu":
                result.relu_()
            if not exact:
                out.copy_(result)

    def differentiate(self, call: NormCall, grads: Backward) -> None:
        """As `Backend.differentiate`: two sums over each ghost, then dx."""
        weight, bias = _parameters(call, grads.statistics)
        # Mean, invstd, and the sums over each ghost of dy xhat and of dy.
        table = torch.cat([grads.statistics[:2], torch.empty_like(grads.statistics[:2])])
        room = None
        for (mean, invstd, dot, total), x, dy, y, dx, dresidual in _pieces(
            call, table, call.x, grads.dy, grads.y, grads.dx, grads.dresidual
        ):
            count = x[0].numel() // len(weight)
            gain = weight * invstd
            centred = room = _centred(x, mean, room)
            passed = dy
            if call.activation == "relu":
                result = centred * _spread(gain, x) + _spread(bias[None], x) if y is None else y
                passed = torch.ops.aten.threshold_backward(dy, result.to(dy.dtype), 0)
                if dresidual is not None:
                    dresidual.copy_(passed)
            exact = dx.dtype == centred.dtype
            products = torch.mul(centred, passed, out=dx if exact else None)
            torch.mul(_sum(products, mean.dtype), invstd, out=dot)
            total.copy_(_sum(passed, mean.dtype))
            slope, level = gain * invstd * dot / -count, gain * total / -count
            wide = torch.mul(centred, _spread(slope, x), out=dx if exact else centred)
            wide.add_(_spread(level, x)).addcmul_(passed, _spread(gain, x))
            if not exact:
                dx.copy_(wide)
        torch.sum(table[2:], 1, out=grads.dparameters)


def _parameters(call: NormCall, statistics: Tensor) -> tuple[Tensor, Tensor]:
    """Return weight and bias, (C,), in the dtype of the statistics; 1 and 0 where there is none."""
    weight, bias = (
        statistics.new_full((call.x.shape[1],), default) if p is None else p.to(statistics.dtype)
        for p, default in ((call.weight, 1.0), (call.bias, 0.0))
    )
    return weight, bias


def _pieces(call: NormCall, table: Tensor, *batches: Tensor | None) -> Iterator[tuple[Any, ...]]:
    """Yield, for each piece of the batch, views of ``table`` (..., K, C) and of the batches."""
    sizes = ghost_sizes(call.x.shape[0], call.ghost)
    counts = [1] * len(sizes)
    if call.x.device.type not in GHOST_BY_GHOST:
        even = len(sizes) if sizes[0] == sizes[-1] else len(sizes) - 1
        counts = [even, len(sizes) - even] if even < len(sizes) else [even]
        sizes = (even * sizes[0], sizes[-1])[: len(counts)]
    rows = in_rows(call.x)
    views: list[Any] = [table.split(counts, -2)]
    for batch in batches:
        if batch is None:
            views.append(repeat(None, len(counts)))
        else:
            pieces = zip(batch.split(sizes), counts, strict=True)
            views.append(_by_ghost(piece, count, rows) for piece, count in pieces)
    return zip(*views, strict=True)


def _by_ghost(x: Tensor, count: int, rows: bool) -> Tensor:
    """View the samples of ``count`` ghosts as (K, R, C) or (K, G, C, S)."""
    if rows:
        return x.movedim(1, -1).view(count, -1, x.shape[1])
    return x.view(count, x.shape[0] // count, x.shape[1], -1)


def _centred(x: Tensor, mean_KC: Tensor, room: Tensor | None) -> Tensor:
    """Return ``x - mean`` in the dtype of the mean, in the memory of ``room`` if that fits."""
    if room is None or room.shape != x.shape:
        room = torch.empty_like(x, dtype=mean_KC.dtype)
    return torch.sub(x, _spread(mean_KC, x), out=room)


def _sum(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Sum over each ghost: (K, C)."""
    return x.sum(1, dtype=dtype) if x.dim() == 3 else x.sum((1, 3), dtype=dtype)


def _spread(values_KC: Tensor, like: Tensor) -> Tensor:
    """View (K, C) so that it broadcasts over a piece."""
    return values_KC.unsqueeze(1) if like.dim() == 3 else values_KC[:, None, :, None]
