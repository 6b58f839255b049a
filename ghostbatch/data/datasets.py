"""Types of a data set in memory: its images as bytes, and its sizes."""

from dataclasses import dataclass
from functools import cached_property
from math import sqrt

import torch
from torch import Tensor

from ghostbatch.data.augment import PadCropFlip


@dataclass(frozen=True)
class Info:
    """The sizes of a data set, so that a run can be planned without its files."""

    samples: int
    """Training images."""
    test_samples: int
    """Test images."""
    classes: int
    """Labels are 0 to classes - 1."""
    shape: tuple[int, int, int]
    """Channels, height and width of an image."""


@dataclass(frozen=True)
class Split:
    """Images (N, C, H, W) as uint8 and their labels."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def to(self, device: torch.device) -> "Split":
        """Return a copy on ``device`` whose images are channels_last."""
        images = self.images.to(device, memory_format=torch.channels_last)
        return Split(images, self.labels.to(device))


@dataclass(frozen=True)
class ImageData:
    """A data set in memory: training images, test images and the augmentation."""

    name: str
    classes: int
    train: Split
    test: Split
    augmentation: PadCropFlip

    @property
    def info(self) -> Info:
        """The sizes of the tensors."""
        channels, height, width = self.train.images.shape[1:]
        return Info(len(self.train), len(self.test), self.classes, (channels, height, width))

    @cached_property
    def mean(self) -> Tensor:
        """Mean of each channel over the training images, on the scale of 0 to 255."""
        return torch.tensor(
            [total / count for count, total, _ in self._power_sums], dtype=torch.float64
        )

    @cached_property
    def deviation(self) -> Tensor:
        """Standard deviation of each channel over the training images."""
        variances = [
            (count * squares - total**2) / count**2 for count, total, squares in self._power_sums
        ]
        return torch.tensor([sqrt(variance) for variance in variances], dtype=torch.float64)

    @cached_property
    def _power_sums(self) -> list[tuple[int, int, int]]:
        """Number of pixels, sum and sum of squares of each channel.

        They are exact integers from a histogram, which needs no copy of the images in fp64.
        """
        sums = []
        for channel in self.train.images.unbind(1):
            counts = torch.bincount(channel.flatten(), minlength=256).tolist()
            powers = ((n, n * value, n * value**2) for value, n in enumerate(counts))
            count, total, squares = (sum(column) for column in zip(*powers, strict=True))
            sums.append((count, total, squares))
        return sums
