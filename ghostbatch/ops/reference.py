"""Ghost batch normalisation the slow, obvious way: one ghost after the other.

This is the definition. Every faster form in the package is tested equal to it.
"""

from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Running = Literal["sequential", "mean"]
Activation = Literal["relu"]

ACTIVATIONS: dict[str | None, Callable[[Tensor], Tensor]] = {None: lambda y: y, "relu": F.relu}


def ghost_count(samples: int, ghost: int) -> int:
    """Return the number of ghosts of a batch, K = max(1, (N + g // 2) // g).

    With g = 2 it is max(1, N // 2): otherwise an odd batch would end in a ghost of one sample.
    """
    return max(1, (samples + (0 if ghost == 2 else ghost // 2)) // ghost)


def ghost_sizes(samples: int, ghost: int) -> tuple[int, ...]:
    """Return the sizes of a batch's ghosts: all are ``ghost``, but the last takes the rest.

    The last is never smaller than half a ghost, unless the batch is, and with g >= 2 it never holds
    a single sample of several.

    >>> ghost_sizes(96, 32), ghost_sizes(100, 32), ghost_sizes(112, 32), ghost_sizes(5, 32)
    ((32, 32, 32), (32, 32, 36), (32, 32, 32, 16), (5,))
    >>> ghost_sizes(7, 2)
    (2, 2, 3)
    """
    count = ghost_count(samples, ghost)
    return (ghost,) * (count - 1) + (samples - ghost * (count - 1),)


def ghost_batch_norm_reference(
    x: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    ghost: int = 128,
    training: bool = True,
    momentum: float | None = 0.1,
    eps: float = 1e-5,
    running: Running = "sequential",
    num_batches_tracked: Tensor | None = None,
    activation: Activation | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """Normalise each ghost of ``x`` (samples first, channels second) by its own statistics.

    Training uses each ghost's mean and biased variance, and updates the running statistics, in
    place, with the mean and the unbiased variance. Evaluation uses the running statistics.
    """
    if training:
        pieces = x.split(ghost_sizes(x.shape[0], ghost))
        means, variances = zip(*map(ghost_moments, pieces), strict=True)
        if running_mean is not None and running_var is not None:
            buffers = running_mean, running_var, num_batches_tracked
            counts = map(values_per_channel, pieces)
            with torch.no_grad():
                unbiased = [v * n / (n - 1) for v, n in zip(variances, counts, strict=True)]
                moments = torch.stack(means).detach(), torch.stack(unbiased).detach()
                update_running(*buffers, *moments, momentum, running)
        ghosts = zip(pieces, means, variances, strict=True)
        y = torch.cat([normalise(*ghost, weight, bias, eps) for ghost in ghosts])
    else:
        by_batch = running_mean is None  # without running statistics use the batch's, as PyTorch
        y = F.batch_norm(x, running_mean, running_var, weight, bias, training=by_batch, eps=eps)
    if residual is not None:
        y = y + residual
    return ACTIVATIONS[activation](y)


def ghost_moments(piece: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean and biased variance of one ghost per channel, in fp32 or better."""
    wide = piece.to(torch.promote_types(piece.dtype, torch.float32))
    dims = [d for d in range(piece.dim()) if d != 1]
    mean = wide.mean(dims)
    return mean, (wide - per_channel(mean, piece)).square().mean(dims)


def normalise(
    piece: Tensor, mean: Tensor, var: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """Return (x - mean) / sqrt(var + eps) * weight + bias in the input's dtype."""
    y = (piece - per_channel(mean, piece)) * per_channel(torch.rsqrt(var + eps), piece)
    if weight is not None:
        y = y * per_channel(weight, piece)
    if bias is not None:
        y = y + per_channel(bias, piece)
    return y.to(piece.dtype)


def update_running(
    running_mean: Tensor,
    running_var: Tensor,
    num_batches_tracked: Tensor | None,
    means: Tensor,
    variances: Tensor,
    momentum: float | None,
    running: Running,
) -> None:
    """Update the running statistics in place with the ghosts' (K, C), oldest first."""
    if running == "mean":
        means, variances = means.mean(0, keepdim=True), variances.mean(0, keepdim=True)
    for mean, var in zip(means, variances, strict=True):
        if num_batches_tracked is not None:
            num_batches_tracked += 1
        if momentum is None:
            if num_batches_tracked is None:
                raise ValueError("momentum=None (a cumulative average) needs num_batches_tracked")
            rate = 1.0 / float(num_batches_tracked)
        else:
            rate = momentum
        running_mean.copy_((1 - rate) * running_mean + rate * mean)
        running_var.copy_((1 - rate) * running_var + rate * var)


def per_channel(values: Tensor, like: Tensor) -> Tensor:
    """Shape a vector over channels so that it broadcasts over ``like``."""
    return values.reshape(1, -1, *(1,) * (like.dim() - 2))


def values_per_channel(x: Tensor) -> int:
    """Return the number of values in each channel of ``x``."""
    return x.numel() // x.shape[1]
