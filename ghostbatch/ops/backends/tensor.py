"""Ghost norm in tensor code, for any device and dtype.

Shapes: K ghosts, G samples of a ghost, C channels, S pixels, R = G S rows. One ghost is viewed as
(R, C) if the batch is in rows, as (G, C, S) if it is in planes; several have K in front.
"""

from collections.abc import Callable, Iterator
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from ghostbatch.ops.backends.base import Backend, Backward, NormCall
from ghostbatch.ops.backends.layouts import in_rows
from ghostbatch.ops.running.stats import RunningStats

GHOST_BY_GHOST = ("cpu",)
"""Devices on which each ghost is a call of its own, because it fits the cache."""

AT_ONCE = 128
"""Ghosts whose views are made at once: there may be half a million."""

FAR = 10.0
"""Deviations between zero and a channel's mean up to which PyTorch's CPU statistics are used.

PyTorch sums in fp32 one by one, so its mean is good to three digits. Up to here that leaves the
variance good to four."""


class TensorBackend(Backend):
    """PyTorch's own batch norm on each ghost, on a CPU; elsewhere tensor code on all ghosts."""

    name = "tensor code"
    key = "tensor"
    recomputes_relu_mask = False

    def available(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Return True: it runs everywhere."""
        del device, dtype
        return True

    def normalise(
        self, call: NormCall, y: Tensor, statistics: Tensor, running: RunningStats | None
    ) -> None:
        """As `Backend.normalise`."""
        del running  # left to the caller
        if call.x.device.type in GHOST_BY_GHOST:
            _normalise(call, y, statistics.zero_(), _by_pytorch)
            far = torch.linalg.vector_norm(statistics[0] * statistics[1], torch.inf)
            if far <= FAR:
                return
        _normalise(call, y, statistics, _in_two_passes)

    def differentiate(self, call: NormCall, grads: Backward) -> None:
        """As `Backend.differentiate`."""
        weight, bias = _parameters(call, grads.statistics)
        one_ghost = call.x.device.type in GHOST_BY_GHOST
        work = _grad_by_pytorch if one_ghost else _grad_in_two_passes
        sums = torch.empty_like(grads.statistics[:2])
        tables = (*grads.statistics[:2], *sums)
        batches = (call.x, grads.dy, grads.y, grads.dx, grads.dresidual)
        pieces = _pieces(call, tables, batches, one_ghost)
        for mean, invstd, dot, total, x, dy, y, dx, dresidual in pieces:
            passed = dy
            if call.activation == "relu":
                result = y
                if y is None:
                    result = (x - _spread(mean, x)) * _spread(weight * invstd, x)
                    result.add_(_spread(bias.expand_as(mean), x))
                passed = torch.ops.aten.threshold_backward(dy, result.to(dy.dtype), 0)
                if dresidual is not None:
                    dresidual.copy_(passed)
            found = work(x, passed, dx, mean, invstd, weight)
            dot.copy_(found[0])
            total.copy_(found[1])
        for target, by_ghost in zip(grads.dparameters, sums, strict=True):
            torch.sum(by_ghost, 0, out=target)


def _normalise(call: NormCall, y: Tensor, statistics: Tensor, work: Callable[..., None]) -> None:
    """Write y and the statistics piece by piece; ``work`` normalises a piece."""
    weight, bias = _parameters(call, statistics)
    batches = (call.x, y, call.residual)
    for part, x, out, residual in _pieces(call, (statistics,), batches, work is _by_pytorch):
        result = out if out.dtype == part.dtype else torch.empty_like(out, dtype=part.dtype)
        work(x, result, part, weight, bias, call.eps)
        if residual is not None:
            result.add_(residual)
        if call.activation == "relu":
            result.relu_()
        if result is not out:
            out.copy_(result)


def _by_pytorch(
    x: Tensor, result: Tensor, part: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> None:
    """Normalise one ghost by PyTorch's batch norm.

    Its "running" statistics, 0 before and with momentum 1, are the ghost's own; the variance is
    unbiased.
    """
    mean, invstd, variance = part
    x, found = x.to(part.dtype), (result, mean, invstd)
    torch.native_batch_norm(x, weight, bias, mean, variance, True, 1.0, eps, out=found)


def _in_two_passes(
    x: Tensor, result: Tensor, part: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> None:
    """Normalise all ghosts of a piece: mean, variance about the mean, result.

    The sum of values far from zero is rounded, so what the mean is off by is taken from the centred
    values.
    """
    mean, invstd, variance = part
    count = x[0].numel() // len(weight)
    torch.div(_sum(x, mean.dtype), count, out=mean)
    centred = torch.sub(x, _spread(mean, x), out=torch.empty_like(result))
    off = _sum(centred, mean.dtype).div_(count)
    squares = torch.mul(centred, centred, out=result)
    torch.div(_sum(squares, mean.dtype), count, out=variance)
    variance.addcmul_(off, off, value=-1).clamp_(min=0)
    torch.rsqrt(variance + eps, out=invstd)
    gain = weight * invstd
    level = torch.addcmul(bias, off, gain, value=-1)
    torch.mul(centred, _spread(gain, x), out=result).add_(_spread(level, x))
    mean.add_(off)
    variance.mul_(count / (count - 1))


def _grad_by_pytorch(
    x: Tensor, dy: Tensor, dx: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor]:
    """Write dx of one ghost; return the sums (C,) of dy xhat and of dy."""
    running = (None, None)
    found, dot, total = torch.ops.aten.native_batch_norm_backward(
        *(dy.to(mean.dtype), x.to(mean.dtype), weight, *running, mean, invstd),
        *(True, 0.0, [True, True, True]),  # in training mode; eps, unused; all three gradients
    )
    dx.copy_(found)
    return dot, total


def _grad_in_two_passes(
    x: Tensor, dy: Tensor, dx: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor]:
    """Write dx of all ghosts of a piece; return their sums (K, C) of dy xhat and of dy."""
    count, gain = x[0].numel() // len(weight), weight * invstd
    centred = x - _spread(mean, x)
    dot, total = _sum(centred * dy, mean.dtype) * invstd, _sum(dy, mean.dtype)
    slope, level = gain * invstd * dot / -count, gain * total / -count
    centred.mul_(_spread(slope, x)).add_(_spread(level, x)).addcmul_(dy, _spread(gain, x))
    dx.copy_(centred)
    return dot, total


def _parameters(call: NormCall, statistics: Tensor) -> tuple[Tensor, Tensor]:
    """Return weight and bias, (C,), in the dtype of the statistics; 1 and 0 where there is none."""
    weight, bias = (
        statistics.new_full((call.x.shape[1],), default) if p is None else p.to(statistics.dtype)
        for p, default in ((call.weight, 1.0), (call.bias, 0.0))
    )
    return weight, bias


def _pieces(
    call: NormCall, tables: tuple[Tensor, ...], batches: tuple[Tensor | None, ...], one_ghost: bool
) -> Iterator[tuple[Any, ...]]:
    """Yield views of the tables (..., K, C) and of the batches: one ghost, or all of one size."""
    rows, (samples, channels) = in_rows(call.x), call.x.shape[:2]
    length = call.x[0, 0].numel() if rows else 1  # of a sample
    flat = [
        batch if batch is None
        else batch.movedim(1, -1).view(-1, channels) if rows
        else batch.view(samples, channels, -1)
        for batch in batches
    ]  # fmt: skip
    for first, count in _runs(call, AT_ONCE if one_ghost else call.ghosts):
        start = first * call.ghost
        size = call.ghost if first + count < call.ghosts else (samples - start) // count
        views: list[Any] = []
        for table in tables:
            part = table.narrow(-2, first, count)
            views.append(part.unbind(-2) if one_ghost else (part,))
        for batch in flat:
            if batch is None:
                views.append(repeat(None, count if one_ghost else 1))
                continue
            part = batch.narrow(0, start * length, count * size * length).unflatten(0, (count, -1))
            views.append(part.unbind() if one_ghost else (part,))
        yield from zip(*views, strict=True)


def _runs(call: NormCall, most: int) -> Iterator[tuple[int, int]]:
    """Yield runs of at most ``most`` ghosts of one size: the first ghost, and how many."""
    even = call.x.shape[0] == call.ghosts * call.ghost or call.ghosts == 1
    alike = call.ghosts if even else call.ghosts - 1
    for first in range(0, alike, most):
        yield first, min(most, alike - first)
    if not even:
        yield alike, 1


def _sum(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Sum over each of several ghosts: (K, C)."""
    return x.sum(1, dtype=dtype) if x.dim() == 3 else x.sum((1, 3), dtype=dtype)


def _spread(values: Tensor, like: Tensor) -> Tensor:
    """View (C,) or (K, C) so that it broadcasts over one ghost or several."""
    rows = like.dim() == values.dim() + 1
    return values.unsqueeze(-2) if rows else values.unsqueeze(-2).unsqueeze(-1)
