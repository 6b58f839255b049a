"""Make a training batch on the GPU in one kernel: gather, pad and crop, flip, normalise.

The draws come from the host, one row of four int32 per image: which image, top, left, flipped or
not, as `ghostbatch.data.augment.PadCropFlip` draws them. The result is channels_last, padded with
channels of zeros where the first convolution wants more than three; or every pixel comes with its
neighbours, so that the first convolution is a 1x1 convolution (`fold.columns`).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ghostbatch.data.augment import PadCropFlip


@triton.jit
def batch_kernel(
    images_ptr,  # (S, H, W, C) bytes
    labels_ptr,  # (S,)
    draws_ptr,  # (N, 4): image, top, left, flip
    mean_ptr,  # (C,)
    scale_ptr,  # (C,)
    x_ptr,  # (N, H, W, WIDTH)
    y_ptr,  # (N,)
    H: tl.constexpr,
    W: tl.constexpr,
    C: tl.constexpr,
    K: tl.constexpr,  # pixels of a patch, in each direction
    WIDTH: tl.constexpr,  # at least K K C
    PAD: tl.constexpr,
    FILL: tl.constexpr,
    BP: tl.constexpr,
    BC: tl.constexpr,
):
    """Write some pixels of one image of the batch, and its label."""
    row = tl.program_id(0).to(tl.int64)
    image = tl.load(draws_ptr + row * 4).to(tl.int64)
    top = tl.load(draws_ptr + row * 4 + 1)
    left = tl.load(draws_ptr + row * 4 + 2)
    flip = tl.load(draws_ptr + row * 4 + 3)
    images_ptr += image * (H * W * C)
    x_ptr += row * (H * W * WIDTH)
    pixel_P1 = tl.program_id(1) * BP + tl.arange(0, BP)[:, None]
    for start in tl.static_range(0, WIDTH, BC):
        value_1C = start + tl.arange(0, BC)[None, :]
        used_1C = value_1C < K * K * C
        colour_1C = value_1C % C
        mean_1C = tl.load(mean_ptr + colour_1C, used_1C, other=0.0)
        scale_1C = tl.load(scale_ptr + colour_1C, used_1C, other=0.0)
        line_PC = pixel_P1 // W + value_1C // (K * C) - K // 2
        column_PC = pixel_P1 % W + (value_1C // C) % K - K // 2
        # Beyond the edge of the crop a convolution pads with zeros, not with the fill.
        shown_PC = (line_PC >= 0) & (line_PC < H) & (column_PC >= 0) & (column_PC < W)
        shown_PC = shown_PC & used_1C
        column_PC = tl.where(flip != 0, W - 1 - column_PC, column_PC) + left - PAD
        line_PC += top - PAD
        inside_PC = (line_PC >= 0) & (line_PC < H) & (column_PC >= 0) & (column_PC < W)
        at_PC = (line_PC * W + column_PC) * C + colour_1C
        byte_PC = tl.load(images_ptr + at_PC, inside_PC & shown_PC & (pixel_P1 < H * W), FILL)
        number_PC = (byte_PC.to(tl.float32) - mean_1C) * scale_1C
        number_PC = tl.where(shown_PC, number_PC, 0.0)
        keep_PC = (pixel_P1 < H * W) & (value_1C < WIDTH)
        to_PC = x_ptr + pixel_P1 * WIDTH + value_1C
        tl.store(to_PC, number_PC.to(x_ptr.dtype.element_ty), keep_PC)
    if tl.program_id(1) == 0:
        tl.store(y_ptr + row, tl.load(labels_ptr + image))


class BatchMaker:
    """Holds a data set on the GPU and writes augmented batches into tensors of its own."""

    def __init__(
        self,
        images: Tensor,  # (S, C, H, W) bytes, channels_last
        labels: Tensor,
        mean: Tensor,
        deviation: Tensor,
        augmentation: PadCropFlip,
        batch: int,
        width: int,
        dtype: torch.dtype,
        kernel: int = 1,
    ) -> None:
        self.images, self.labels = images, labels
        self.mean, self.scale = mean.float(), (1 / deviation).float()
        self.augmentation, self.kernel = augmentation, kernel
        size = (batch, *images.shape[2:], width)
        self.x = torch.zeros(size, dtype=dtype, device=images.device).permute(0, 3, 1, 2)
        self.y = torch.zeros(batch, dtype=labels.dtype, device=images.device)
        self.draws = torch.zeros(batch, 4, dtype=torch.int32, device=images.device)

    def draw(self, generator: torch.Generator) -> Tensor:
        """Draw a batch on the host: (N, 4) int32, in pinned memory if there is a GPU."""
        chosen = torch.randint(len(self.images), (1, len(self.y)), generator=generator)
        rest = self.augmentation.draw(len(self.y), generator)
        draws = torch.cat([chosen, rest]).T.to(torch.int32).contiguous()
        return draws.pin_memory() if self.x.is_cuda else draws

    def make(self) -> None:
        """Write the batch that the draws say into ``x`` and ``y``."""
        C, H, W = self.images.shape[1:]
        width = self.x.shape[1]
        BP = min(256, triton.next_power_of_2(H * W))
        batch_kernel[(len(self.y), triton.cdiv(H * W, BP))](
            self.images, self.labels, self.draws, self.mean, self.scale, self.x, self.y,
            H=H, W=W, C=C, K=self.kernel, WIDTH=width,
            PAD=self.augmentation.pad, FILL=self.augmentation.fill,
            BP=BP, BC=min(16, triton.next_power_of_2(width)),
        )  # fmt: skip
