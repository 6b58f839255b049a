"""Padding, random crops and horizontal flips, in one indexing operation on the data set."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class PadCropFlip:
    """Pad each side by ``pad`` pixels of value ``fill``, crop and flip at random."""

    pad: int
    fill: int

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        """Draw top, left and flip (0 or 1) for each of ``count`` images; returns (3, count)."""
        corners = torch.randint(2 * self.pad + 1, (2, count), generator=generator)
        flips = torch.rand(1, count, generator=generator) < 0.5
        return torch.cat([corners, flips.long()])

    def __call__(self, images: Tensor, chosen: Tensor, draws: Tensor) -> Tensor:
        """Return crops of ``images[chosen]``, (M, C, H, W), as given by ``draws`` (3, M).

        The result is channels_last in memory, since the channels of a pixel are gathered together.
        """
        height, width = images.shape[2:]
        top, left, flip = draws.unsqueeze(-1)
        rows = top - self.pad + torch.arange(height, device=images.device)
        columns = left - self.pad + torch.arange(width, device=images.device)
        columns = torch.where(flip.bool(), columns.flip(1), columns)
        rows, columns = rows.unsqueeze(2), columns.unsqueeze(1)
        inside = (rows >= 0) & (rows < height) & (columns >= 0) & (columns < width)
        rows, columns = rows.clamp(0, height - 1), columns.clamp(0, width - 1)
        crops = images.permute(0, 2, 3, 1)[chosen.view(-1, 1, 1), rows, columns]
        return torch.where(inside.unsqueeze(-1), crops, self.fill).permute(0, 3, 1, 2)
