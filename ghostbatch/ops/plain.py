"""Ghost norm in plain tensor code, for any device: the fast twin of `reference` without kernels.

A ghost is small. Its statistics are taken and used while it is still in the cache, which is how
this keeps up with, and for contiguous images beats, PyTorch's own batch norm on a CPU.

Shapes: K ghosts, G samples of a ghost, C channels, S pixels, R = G S rows.
Two layouts are worked on as they are; anything else is copied into the nearer one first:
    rows    x_KRC   channels innermost: (N, C) inputs and channels_last
    planes  x_KGCS  pixels innermost: contiguous images
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ghostbatch.ops.layouts import as_dense_as, in_rows, workable
from ghostbatch.ops.reference import ghost_sizes

WAVE = 1 << 20
"""Values worked on at a time on a CPU: in fp32, 4 MB and as much of scratch space."""

NATIVE = 1 << 17
"""Values of a ghost from which PyTorch's own CPU kernel outweighs the cost of calling it."""

FAR = 10.0
"""Deviations between zero and a channel's mean up to which PyTorch's CPU statistics are used.

A mean that is good to 1e-3 then leaves the variance good to 1e-4."""


class Statistics(NamedTuple):
    """Per ghost and channel, (K, C), in fp32 or better: the parts of one (3, K, C) tensor."""

    mean: Tensor
    invstd: Tensor
    """1 / sqrt(biased variance + eps)."""
    variance: Tensor
    """Unbiased, for the running statistics."""


def statistics_dtype(x: Tensor) -> torch.dtype:
    """fp32 for half-precision inputs, else the input's own."""
    return torch.promote_types(x.dtype, torch.float32)


def forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    ghost: int,
    eps: float,
    activation: str | None = None,
    residual: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Normalise each ghost of ``x`` by its own statistics; return both.

    The result, ``activation(norm(x) + residual)``, has the layout of ``x``; the other tensor holds
    the `Statistics`.
    """
    y = torch.empty_like(x)
    dense, out = workable(x, y)
    sizes = ghost_sizes(x.shape[0], ghost)
    table = x.new_zeros(3, len(sizes), x.shape[1], dtype=statistics_dtype(x))
    scale, shift = (
        torch.full_like(table[0, 0], default) if p is None else p.to(table.dtype)
        for p, default in ((weight, 1.0), (bias, 0.0))
    )
    native = _is_large(dense, sizes) and in_rows(dense)
    room: Tensor | None = None
    for x_wave, y_wave, *part in _waves((dense, out), table.unbind(), sizes, native):
        if native:
            _forward_native(x_wave, y_wave, Statistics(*part), scale, shift, eps)
        else:
            room = _room_for(x_wave, room, table.dtype)
            _forward_wave(x_wave, y_wave, room, Statistics(*part), scale, shift, eps)
    if out is not y:
        y.copy_(out)
    if residual is not None:
        y.add_(residual)
    if activation == "relu":
        y.relu_()
    return y, table


def backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    statistics: Tensor,
    ghost: int,
    activation: str | None = None,
    bias: Tensor | None = None,
    y: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the input, of weight and bias (2, C), and of the residual, given the output's.

    With xhat = (x - mean) invstd and means over the ghost,
    dx = weight invstd (dy - mean(dy) - xhat mean(dy xhat)).
    What the activation let pass is told by its result ``y``, or else from the input; the residual's
    gradient is what passed, and is computed where ``y`` is given (a residual makes it necessary).
    """
    mean, invstd, _ = statistics
    dresidual = x.new_empty(0)
    if activation == "relu":
        result = _affine_again(x, weight, bias, statistics, ghost) if y is None else y
        dy = torch.ops.aten.threshold_backward.grad_input(
            dy, result, 0, grad_input=torch.empty_like(x)
        )
        dresidual = dresidual if y is None else dy
    dx = torch.empty_like(x)
    dense, out = workable(x, dx)
    dy = as_dense_as(dense, dy)
    sizes = ghost_sizes(x.shape[0], ghost)
    sums = torch.empty_like(statistics[:2])  # of dy xhat, and of dy
    gain = invstd if weight is None else weight.to(mean.dtype) * invstd
    native = _is_large(dense, sizes)
    room: Tensor | None = None
    for wave in _waves((dense, dy, out), (mean, invstd, gain, *sums), sizes, native):
        if native:
            _backward_native(*wave)
        else:
            room = _room_for(wave[0], room, mean.dtype)
            _backward_wave(room, *wave)
    if out is not dx:
        dx.copy_(out)
    return dx, sums.sum(1), dresidual


def _affine_again(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, statistics: Tensor, ghost: int
) -> Tensor:
    """What the activation was applied to, from the input and the `Statistics`."""
    mean, invstd, _ = statistics
    y = torch.empty_like(x)
    dense, out = workable(x, y)
    slope = invstd if weight is None else weight.to(mean.dtype) * invstd
    level = torch.zeros_like(mean) if bias is None else bias.to(mean.dtype).expand_as(mean)
    sizes = ghost_sizes(x.shape[0], ghost)
    for x_wave, y_wave, *part in _waves((dense, out), (mean, slope, level), sizes, False):
        m, s, b = (_spread(values, x_wave) for values in part)
        torch.addcmul(b, x_wave - m, s, out=y_wave)
    return y if out is y else y.copy_(out)


# ------------------------------------------------------------------------------- one wave at a time


def _forward_wave(
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
    torch.div(_sum(x, part.mean.dtype), count, out=part.mean)
    torch.sub(x, _spread(part.mean, x), out=centred)
    squares = torch.mul(centred, centred, out=y if y.dtype == centred.dtype else None)
    variance = _sum(squares, part.mean.dtype).div_(count)
    torch.mul(variance, count / (count - 1), out=part.variance)
    torch.rsqrt(variance.add_(eps), out=part.invstd)
    slope, level = _spread(scale * part.invstd, x), _spread(shift.unsqueeze(0), x)
    _affine(centred, slope, level, out=y)


def _backward_wave(
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
    torch.sub(x, _spread(mean, x), out=centred)
    products = torch.mul(centred, dy, out=dx if dx.dtype == centred.dtype else None)
    torch.mul(_sum(products, mean.dtype), invstd, out=dot)
    total.copy_(_sum(dy, mean.dtype))
    slope, level = (gain * invstd).mul_(dot).div_(-count), (gain * total).div_(-count)
    wide = dx if dx.dtype == centred.dtype else centred
    _affine(centred, _spread(slope, x), _spread(level, x), out=wide)
    wide.addcmul_(dy, _spread(gain, x))
    if wide is not dx:
        dx.copy_(wide)


def _room_for(x: Tensor, room: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Scratch space shaped as ``x``: that of the wave before, still in the cache, if it fits."""
    if room is not None and room.shape[1:] == x.shape[1:] and len(room) >= len(x):
        return room[: len(x)]
    return torch.empty_like(x, dtype=dtype)


def _affine(x: Tensor, slope: Tensor, level: Tensor, out: Tensor) -> None:
    """``out = x slope + level``, spread over ``x``, rounded once, as fast as that allows."""
    if x.dim() == 3 or out.dtype != x.dtype:
        torch.addcmul(level, x, slope, out=out)
    else:
        torch.mul(x, slope, out=out).add_(level)


def _sum(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Over a ghost: (K, C)."""
    return x.sum(1, dtype=dtype) if x.dim() == 3 else x.sum((1, 3), dtype=dtype)


def _spread(values_KC: Tensor, like: Tensor) -> Tensor:
    """Make (K, C) broadcast over rows or planes."""
    return values_KC.unsqueeze(1) if like.dim() == 3 else values_KC[:, None, :, None]


# --------------------------------------------------------- large ghosts on a CPU: PyTorch's kernels


def _is_large(x: Tensor, sizes: tuple[int, ...]) -> bool:
    """Whether PyTorch's own CPU kernels, called ghost by ghost, are worth their calls."""
    exact = x.dtype in (torch.float32, torch.float64)
    return x.device.type == "cpu" and exact and sizes[0] * x[0].numel() >= NATIVE


def _forward_native(
    x_KRC: Tensor, y_KRC: Tensor, part: Statistics, scale: Tensor, shift: Tensor, eps: float
) -> None:
    """Ghost by ghost, with the statistics taken by PyTorch.

    With momentum 1 its "running" statistics are the ghost's own, unbiased variance included. It
    sums in fp32 one by one, so the mean is good to three digits only, and its error, squared, ends
    in the variance: a ghost where that is too much is done again in waves.
    """
    unused = torch.zeros_like(scale)
    for image, x, y, mean, invstd, unbiased in zip(
        _as_images(x_KRC), x_KRC, y_KRC, *part, strict=True
    ):
        found, variance = torch.batch_norm_update_stats(image, unused, unbiased, 1.0)
        mean.copy_(found)
        torch.rsqrt(variance.add_(eps), out=invstd)
        slope = scale * invstd
        torch.addcmul(torch.addcmul(shift, mean, slope, value=-1), x, slope, out=y)
    far = (part.mean * part.invstd).abs().amax(1) > FAR
    for k in far.nonzero().flatten().tolist():
        one = slice(k, k + 1)
        room = _room_for(x_KRC[one], None, part.mean.dtype)
        again = Statistics(*(values[one] for values in part))
        _forward_wave(x_KRC[one], y_KRC[one], room, again, scale, shift, eps)


def _backward_native(
    x: Tensor,
    dy: Tensor,
    dx: Tensor,
    mean: Tensor,
    invstd: Tensor,
    gain: Tensor,
    dot: Tensor,
    total: Tensor,
) -> None:
    """As `_backward_wave`, ghost by ghost, with the sums taken by PyTorch.

    To PyTorch they are the gradients of a weight of one and of a bias. Its own dx would have to be
    copied into its place, which costs more than to compute it there.
    """
    count = x[0].numel() // mean.shape[1]
    ones = torch.ones_like(mean[0])
    # Few calls per ghost: with the caches full of pixels, each costs what it takes to read itself.
    tables = (_spread(t, x) for t in (mean, gain, gain * invstd / -count, gain / -count))
    ghosts = (each.split(1) for each in (x, dy, dx, *tables))
    images = (_as_images(x), _as_images(dy), mean, invstd)
    found = []
    for x_image, dy_image, m, i, x_k, dy_k, dx_k, mean_k, gain_k, slope, level in zip(
        *images, *ghosts, strict=True
    ):
        arguments = (dy_image, x_image, ones, None, None, m, i, True, 0.0, [False, True, True])
        _, *sums = torch.ops.aten.native_batch_norm_backward.default(*arguments)
        slope.mul_(sums[0].view_as(slope))
        level.mul_(sums[1].view_as(level)).addcmul_(slope, mean_k, value=-1)  # x is not centred
        _affine(x_k, slope, level, out=dx_k)
        dx_k.addcmul_(dy_k, gain_k)
        found.append(sums)
    for table, column in zip((dot, total), zip(*found, strict=True), strict=True):
        torch.stack(column, out=table)


def _as_images(x: Tensor) -> tuple[Tensor, ...]:
    """Each ghost as a batch of images: one of R pixels in channels_last, or G contiguous ones."""
    images = x.transpose(1, 2).unsqueeze(-1) if x.dim() == 3 else x.flatten(0, 1).unsqueeze(-1)
    return images.split(len(images) // len(x))  # type: ignore[no-any-return]


# -------------------------------------------------------------------------------------------- waves


def _waves(
    batches: tuple[Tensor, ...],
    tables: tuple[Tensor, ...],
    sizes: tuple[int, ...],
    all_at_once: bool,
) -> Iterator[tuple[Tensor, ...]]:
    """Ghosts of one size that fit the cache together: their views of batches and (K, C) tables.

    With ``all_at_once`` those of one size come in one wave: native code goes ghost by ghost anyway.
    """
    first = batches[0]
    count, ghost = len(sizes), sizes[0]
    even = count if sizes[-1] == ghost else count - 1  # the last ghost may be of another size
    values = ghost * first[0].numel()
    step = count if all_at_once or first.device.type != "cpu" else max(1, WAVE // values)
    if even == count:
        parts = [(*(_ghosts(batch, count) for batch in batches), *tables)]
    else:
        cut = even * ghost
        parts = [
            (*(_ghosts(batch[:cut], even) for batch in batches), *(t[:even] for t in tables)),
            (*(_ghosts(batch[cut:], 1) for batch in batches), *(t[even:] for t in tables)),
        ]
    for views in parts:
        if step < count:
            yield from zip(*(view.split(step) for view in views), strict=True)
        else:
            yield views


def _ghosts(x: Tensor, count: int) -> Tensor:
    """View some samples as ``count`` ghosts, in rows or in planes."""
    if in_rows(x):
        return x.movedim(1, -1).view(count, -1, x.shape[1])
    return x.view(count, x.shape[0] // count, x.shape[1], -1)
