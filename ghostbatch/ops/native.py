"""Large ghosts on a CPU, by PyTorch's own kernels, ghost by ghost. See `plain` for the shapes."""

import torch
from torch import Tensor

from ghostbatch.ops.waves import Statistics, affine, forward_wave, room_for, spread

FAR = 10.0
"""Deviations between zero and a channel's mean up to which PyTorch's CPU statistics are used.

A mean that is good to 1e-3 then leaves the variance good to 1e-4."""


def forward_native(
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
        room = room_for(x_KRC[one], None, part.mean.dtype)
        again = Statistics(*(values[one] for values in part))
        forward_wave(x_KRC[one], y_KRC[one], room, again, scale, shift, eps)


def backward_native(
    x: Tensor,
    dy: Tensor,
    dx: Tensor,
    mean: Tensor,
    invstd: Tensor,
    gain: Tensor,
    dot: Tensor,
    total: Tensor,
) -> None:
    """As `backward_wave`, ghost by ghost, with the sums taken by PyTorch.

    To PyTorch they are the gradients of a weight of one and of a bias. Its own dx would have to be
    copied into its place, which costs more than to compute it there.
    """
    count = x[0].numel() // mean.shape[1]
    ones = torch.ones_like(mean[0])
    # Few calls per ghost: with the caches full of pixels, each costs what it takes to read itself.
    tables = (spread(t, x) for t in (mean, gain, gain * invstd / -count, gain / -count))
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
        affine(x_k, slope, level, out=dx_k)
        dx_k.addcmul_(dy_k, gain_k)
        found.append(sums)
    for table, column in zip((dot, total), zip(*found, strict=True), strict=True):
        torch.stack(column, out=table)


def _as_images(x: Tensor) -> tuple[Tensor, ...]:
    """Each ghost as a batch of images: one of R pixels in channels_last, or G contiguous ones."""
    images = x.transpose(1, 2).unsqueeze(-1) if x.dim() == 3 else x.flatten(0, 1).unsqueeze(-1)
    return images.split(len(images) // len(x))  # type: ignore[no-any-return]
