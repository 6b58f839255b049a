"""Make a training batch on the GPU in one kernel: gather, pad and crop, flip, normalise.

The draws come from the host, one row of four int32 per image: which image, top, left, flipped or
not, as `ghostbatch.data.augment.PadCropFlip` draws them. The result is channels_last, padded with
channels of zeros where the first convolution wants more than three.
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
    WIDTH: tl.constexpr,
    PAD: tl.constexpr,
    FILL: tl.constexpr,
    BP: tl.constexpr,
    BC: tl.constexpr,
):
    """Write one image of the batch, and its label."""
    row = tl.program_id(0).to(tl.int64)
    image = tl.load(draws_ptr + row * 4).to(tl.int64)
    top = tl.load(draws_ptr + row * 4 + 1)
    left = tl.load(draws_ptr + row * 4 + 2)
    flip = tl.load(draws_ptr + row * 4 + 3)
    channel_1C = tl.arange(0, BC)[None, :]
    colour_1C = channel_1C < C
    mean_1C = tl.load(mean_ptr + channel_1C, colour_1C, other=0.0)
    scale_1C = tl.load(scale_ptr + channel_1C, colour_1C, other=0.0)
    for start in tl.static_range(0, H * W, BP):
        pixel_P1 = start + tl.arange(0, BP)[:, None]
        column_P1 = pixel_P1 % W
        column_P1 = tl.where(flip != 0, W - 1 - column_P1, column_P1) + left - PAD
        line_P1 = pixel_P1 // W + top - PAD
        inside_P1 = (line_P1 >= 0) & (line_P1 < H) & (column_P1 >= 0) & (column_P1 < W)
        inside_P1 = inside_P1 & (pixel_P1 < H * W)
        at_PC = (line_P1 * W + column_P1) * C + channel_1C
        value_PC = tl.load(images_ptr + image * (H * W * C) + at_PC, inside_P1 & colour_1C, FILL)
        value_PC = (value_PC.to(tl.float32) - mean_1C) * scale_1C
        to_PC = x_ptr + row * (H * W * WIDTH) + pixel_P1 * WIDTH + channel_1C
        keep_PC = (pixel_P1 < H * W) & (channel_1C < WIDTH)
        tl.store(to_PC, value_PC.to(x_ptr.dtype.element_ty), keep_PC)
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
    ) -> None:
        self.images, self.labels = images, labels
        self.mean, self.scale = mean.float(), (1 / deviation).float()
        self.augmentation = augmentation
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
        batch_kernel[(len(self.y),)](
            self.images, self.labels, self.draws, self.mean, self.scale, self.x, self.y,
            H=H, W=W, C=C, WIDTH=width, PAD=self.augmentation.pad, FILL=self.augmentation.fill,
            BP=min(1024, triton.next_power_of_2(H * W)), BC=triton.next_power_of_2(width),
        )  # fmt: skip
