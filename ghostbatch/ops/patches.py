"""The pixels around each pixel as its channels, so that a first layer is a matrix product."""

import torch.nn.functional as F
from torch import Tensor


def patch_width(channels: int, kernel: int) -> int:
    """Return the channels of `patches`, a multiple of 16, as matrix units need; 1 x 1 ones stay.

    >>> patch_width(3, 5), patch_width(3, 1)
    (80, 3)
    """
    return -(-kernel * kernel * channels // 16) * 16 if kernel > 1 else channels


def patches(x: Tensor, kernel: int) -> Tensor:
    """Return the k x k pixels around each pixel as its channels, channels_last.

    The channels are padded with zeros, see `patch_width`.
    """
    N, C, H, W = x.shape
    around = kernel // 2
    rows = F.pad(x.permute(0, 2, 3, 1), (0, 0, around, around, around, around))
    strides = rows.stride()
    windows = rows.as_strided((N, H, W, kernel, kernel * C), (*strides[:3], strides[1], strides[3]))
    used = kernel * kernel * C
    result = x.new_empty(N, H, W, patch_width(C, kernel))
    result[..., :used].unflatten(-1, (kernel, -1)).copy_(windows)
    result[..., used:].zero_()
    return result.permute(0, 3, 1, 2)
