"""Ghost norm in plain tensor code, for any device: the fast twin of `reference` without kernels.

A ghost is small. Its statistics are taken and used while it is still in the cache, which is how
this keeps up with, and for contiguous images beats, PyTorch's own batch norm on a CPU.

Shapes: K ghosts, G samples of a ghost, C channels, S pixels, R = G S rows.
Two layouts are worked on as they are; anything else is copied into the nearer one first:
    rows    x_KRC   channels innermost: (N, C) inputs and channels_last
    planes  x_KGCS  pixels innermost: contiguous images
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from ghostbatch.ops.layouts import as_dense_as, in_rows, workable
from ghostbatch.ops.native import backward_native, forward_native
from ghostbatch.ops.reference import ghost_sizes
from ghostbatch.ops.waves import Statistics, backward_wave, forward_wave, room_for, spread

WAVE = 1 << 20
"""Values worked on at a time on a CPU: in fp32, 4 MB and as much of scratch space."""

NATIVE_FORWARD = 1 << 16
NATIVE_BACKWARD = 1 << 17
"""Values of a ghost from which PyTorch's own CPU kernels outweigh the cost of calling them."""


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
    native = in_rows(dense) and _is_large(dense, sizes, NATIVE_FORWARD)
    room: Tensor | None = None
    for x_wave, y_wave, *part in _waves((dense, out), table.unbind(), sizes, native):
        if native:
            forward_native(x_wave, y_wave, Statistics(*part), scale, shift, eps)
        else:
            room = room_for(x_wave, room, table.dtype)
            forward_wave(x_wave, y_wave, room, Statistics(*part), scale, shift, eps)
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
    sums = mean.new_empty(2, *mean.shape)  # of dy xhat, and of dy
    gain = invstd if weight is None else weight.to(mean.dtype) * invstd
    native = _is_large(dense, sizes, NATIVE_BACKWARD)
    room: Tensor | None = None
    for wave in _waves((dense, dy, out), (mean, invstd, gain, *sums), sizes, native):
        if native:
            backward_native(*wave)
        else:
            room = room_for(wave[0], room, mean.dtype)
            backward_wave(room, *wave)
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
        m, s, b = (spread(values, x_wave) for values in part)
        torch.addcmul(b, x_wave - m, s, out=y_wave)
    return y if out is y else y.copy_(out)


def _is_large(x: Tensor, sizes: tuple[int, ...], least: int) -> bool:
    """Whether PyTorch's own CPU kernels, called ghost by ghost, are worth their calls."""
    exact = x.dtype in (torch.float32, torch.float64)
    return x.device.type == "cpu" and exact and sizes[0] * (x.numel() // len(x)) >= least


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
    values = ghost * (first.numel() // len(first))
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
