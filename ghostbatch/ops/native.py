"""Ghosts of some size on a CPU, by PyTorch's own sums over each. See `plain` for the shapes."""

import torch
from torch import Tensor

from ghostbatch.ops.waves import Statistics, forward_wave, room_for

FAR = 10.0
"""Deviations between zero and a channel's mean up to which PyTorch's CPU statistics are used.

A mean that is good to 1e-3 then leaves the variance good to 1e-4."""

SUMS = [False, True, True]
"""Not the gradient of the input, but those of weight and bias."""


def forward_native(
    x_KRC: Tensor, y_KRC: Tensor, part: Statistics, scale: Tensor, shift: Tensor, eps: float
) -> None:
    """Ghost by ghost, by PyTorch, which writes everything where it belongs.

    With momentum 1 its "running" statistics are the ghost's own, unbiased variance included. It
    sums in fp32 one by one, so the mean is good to three digits only, and its error, squared, ends
    in the variance: a ghost where that is too much is done again in waves.
    """
    for x, y, mean, invstd, unbiased in zip(_images(x_KRC), _images(y_KRC), *part, strict=True):
        statistics = (mean, unbiased, True, 1.0, eps)  # the mean is written twice
        torch.native_batch_norm(x, scale, shift, *statistics, out=(y, mean, invstd))
    far = part.mean * part.invstd
    if torch.linalg.vector_norm(far, torch.inf) <= FAR:
        return
    for k in (~(far.abs().amax(1) <= FAR)).nonzero().flatten().tolist():
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
    """As `backward_wave`, with the sums taken by PyTorch, ghost by ghost.

    To PyTorch they are the gradients of a weight, which may be missing, and of a bias; given the
    right "deviation", the weight's is the slope in dx = gain (dy + slope x) + level. PyTorch's own
    dx would have to be copied into its place, which costs more than to compute it there.
    """
    count = x.numel() // mean.numel()
    sums: list[Tensor] = []
    images, ghosts = (_images(dy), _images(x)), (x.unbind(), dy.unbind(), dx.unbind())
    tables = (mean, invstd.square().div_(-count), gain, gain / -count)
    # Few calls per ghost: with the caches full of pixels, each costs what it takes to read itself.
    for dy_image, x_image, x_k, dy_k, dx_k, m, factor, gain_k, share in zip(
        *images, *ghosts, *tables, strict=True
    ):
        arguments = (dy_image, x_image, None, None, None, m, factor, True, 0.0, SUMS)
        _, slope, bias = torch.ops.aten.native_batch_norm_backward.default(*arguments)
        level = torch.addcmul(bias, slope, m, value=count).mul_(share)
        sums += slope, bias
        if x.dim() == 3:
            torch.addcmul(dy_k, x_k, slope, out=dx_k)
            torch.addcmul(level, dx_k, gain_k, out=dx_k)
        else:
            torch.addcmul(dy_k, x_k, slope.unsqueeze(1), out=dx_k)
            dx_k.mul_(gain_k.unsqueeze(1)).add_(level.unsqueeze(1))
    tiny = torch.finfo(invstd.dtype).tiny  # where the variance is beyond all numbers, 0 / 0 is 0
    torch.div(torch.stack(sums[::2]), invstd.clamp_min(tiny), out=dot).mul_(-count)
    torch.stack(sums[1::2], out=total)


def _images(x: Tensor) -> tuple[Tensor, ...]:
    """Each ghost as a batch of images: one of R pixels in channels_last, or G contiguous ones."""
    images = x.transpose(1, 2).unsqueeze(1) if x.dim() == 3 else x
    return images.unsqueeze(-1).unbind()
