"""Pad, crop at random and flip: a whole batch in one gather."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class PadCropFlip:
    """Pad each side by ``pad`` pixels of value ``fill``, crop back, mirror half of the images."""

    pad: int
    fill: int

    def __call__(self, images: Tensor, draw: torch.Generator) -> Tensor:
        """Augment uint8 ``images`` (N, C, H, W); ``draw`` decides each image's crop and flip."""
        count, channels, height, width = images.shape
        top, left = torch.randint(2 * self.pad + 1, (2, count, 1), generator=draw)
        flip = torch.rand(count, 1, generator=draw) < 0.5
        rows = top + torch.arange(height)
        columns = left + torch.arange(width)
        columns = torch.where(flip, columns.flip(1), columns)
        padded = F.pad(images, [self.pad] * 4, value=self.fill)
        return padded[
            torch.arange(count, device=images.device).view(-1, 1, 1, 1),
            torch.arange(channels, device=images.device).view(1, -1, 1, 1),
            rows.to(images.device).view(count, 1, height, 1),
            columns.to(images.device).view(count, 1, 1, width),
        ]
