"""The kernel that makes a training batch: gathers, crops, flips and normalises in one pass.

Shapes: P pixels of a program, C values of a pixel of the result.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ghostbatch.ops.backends.base import on_device
from ghostbatch.ops.patches import patch_width


@triton.jit
def batch_kernel(
    images_ptr,  # (S, H, W, COLOURS) bytes
    draws_ptr,  # (1, N) numbers of images, or (4, N) with top, left and flip
    mean_ptr,  # (COLOURS,), as the scale
    scale_ptr,
    x_ptr,  # (N, H, W, WIDTH)
    stride,  # between two rows of the draws
    H: tl.constexpr,
    W: tl.constexpr,
    COLOURS: tl.constexpr,
    CROP: tl.constexpr,  # whether there are four draws
    PAD: tl.constexpr,
    FILL: tl.constexpr,  # value of the padding
    K: tl.constexpr,  # rows and columns of a patch
    WIDTH: tl.constexpr,  # at least K K COLOURS; the rest is 0
    BP: tl.constexpr,
    BC: tl.constexpr,
):
    """Write some pixels of one image of the batch."""
    row = tl.program_id(0).to(tl.int64)
    image = tl.load(draws_ptr + row)
    images_ptr += image * (H * W * COLOURS)
    x_ptr += row * (H * W * WIDTH)
    pixel_P1 = tl.program_id(1) * BP + tl.arange(0, BP)[:, None]
    for start in tl.static_range(0, WIDTH, BC):
        value_1C = start + tl.arange(0, BC)[None, :]
        used_1C = value_1C < K * K * COLOURS
        colour_1C = value_1C % COLOURS
        mean_1C = tl.load(mean_ptr + colour_1C, used_1C, other=0.0)
        scale_1C = tl.load(scale_ptr + colour_1C, used_1C, other=0.0)
        line_PC = pixel_P1 // W + value_1C // (K * COLOURS) - K // 2
        column_PC = pixel_P1 % W + (value_1C // COLOURS) % K - K // 2
        # Beyond the edge of the crop a convolution pads with zeros, not with FILL.
        shown_PC = (line_PC >= 0) & (line_PC < H) & (column_PC >= 0) & (column_PC < W) & used_1C
        if CROP:
            top = tl.load(draws_ptr + stride + row)
            left = tl.load(draws_ptr + 2 * stride + row)
            flip = tl.load(draws_ptr + 3 * stride + row)
            column_PC = tl.where(flip != 0, W - 1 - column_PC, column_PC) + left - PAD
            line_PC = line_PC + top - PAD
        inside_PC = (line_PC >= 0) & (line_PC < H) & (column_PC >= 0) & (column_PC < W)
        at_PC = (line_PC * W + column_PC) * COLOURS + colour_1C
        there_PC = inside_PC & shown_PC & (pixel_P1 < H * W)
        byte_PC = tl.load(images_ptr + at_PC, there_PC, other=FILL)
        number_PC = (byte_PC.to(tl.float32) - mean_1C) * scale_1C
        number_PC = tl.where(shown_PC, number_PC, 0.0)
        keep_PC = (pixel_P1 < H * W) & (value_1C < WIDTH)
        to_ptr = x_ptr + pixel_P1 * WIDTH + value_1C
        tl.store(to_ptr, number_PC.to(x_ptr.dtype.element_ty), keep_PC)


def make_batch(
    images: Tensor,
    draws: Tensor,
    mean: Tensor,
    scale: Tensor,
    *,
    pad: int,
    fill: int,
    patch: int,
    dtype: torch.dtype,
) -> Tensor:
    """Return (image - mean) scale of some images, or its patches, in channels_last.

    Args:
        images: (S, C, H, W) bytes, channels_last.
        draws: (1, N) numbers of images, or (4, N) with the top, left and flip of their crops.
        mean: (C,) fp32.
        scale: (C,) fp32.
        pad: pixels by which images are padded before they are cropped.
        fill: value of the padding.
        patch: rows and columns of pixels that become the channels of a pixel, see
            `ghostbatch.ops.patches`; 1 is the pixel itself.
        dtype: of the result.

    """
    C, H, W = images.shape[1:]
    N, width = draws.shape[1], patch_width(C, patch)
    x = torch.empty(N, H, W, width, dtype=dtype, device=images.device)
    BP = min(256, triton.next_power_of_2(H * W))
    with on_device(images.device):
        batch_kernel[(N, triton.cdiv(H * W, BP))](
            *(images, draws, mean, scale, x, draws.stride(0)),
            **{"H": H, "W": W, "COLOURS": C, "CROP": len(draws) == 4, "PAD": pad, "FILL": fill},
            **{"K": patch, "WIDTH": width, "BP": BP, "BC": min(16, triton.next_power_of_2(width))},
        )
    return x.permute(0, 3, 1, 2)
