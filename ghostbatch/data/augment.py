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

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        """What becomes of each of ``count`` images: top, left, and flipped or not, (3, count)."""
        corners = torch.randint(2 * self.pad + 1, (2, count), generator=generator)
        flips = torch.rand(1, count, generator=generator) < 0.5
        return torch.cat([corners, flips.long()])

    def __call__(self, images: Tensor, draws: Tensor) -> Tensor:
        """Augment uint8 ``images`` (N, C, H, W) as ``draws`` (3, N) say."""
        count, channels, height, width = images.shape
        device = images.device
        top, left, flip = draws.to(device).unsqueeze(-1)
        rows = top + torch.arange(height, device=device)
        columns = left + torch.arange(width, device=device)
        columns = torch.where(flip.bool(), columns.flip(1), columns)
        padded = F.pad(images, [self.pad] * 4, value=self.fill)
        return padded[
            torch.arange(count, device=device).view(-1, 1, 1, 1),
            torch.arange(channels, device=device).view(1, -1, 1, 1),
            rows.view(count, 1, height, 1),
            columns.view(count, 1, 1, width),
        ]
