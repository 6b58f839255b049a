"""What a data set is: tensors of bytes, and what is known of them before any file is read."""

from dataclasses import dataclass
from functools import cached_property
from math import sqrt

import torch
from torch import Tensor

from ghostbatch.data.augment import PadCropFlip


@dataclass(frozen=True)
class Info:
    """The sizes of a data set, declared so that a run can be planned without its files."""

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
        """The same on a device, with the channels of a pixel side by side."""
        images = self.images.to(device, memory_format=torch.channels_last)
        return Split(images, self.labels.to(device))


@dataclass(frozen=True)
class ImageData:
    """A data set: what to train on, what to test on, and how its images are treated."""

    name: str
    classes: int
    train: Split
    test: Split
    augmentation: PadCropFlip

    @property
    def info(self) -> Info:
        """The sizes that the tensors have."""
        channels, height, width = self.train.images.shape[1:]
        return Info(len(self.train), len(self.test), self.classes, (channels, height, width))

    @cached_property
    def mean(self) -> Tensor:
        """Mean of each channel over the training images, in units of one pixel value."""
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
        """How many pixels each channel has, their sum and that of their squares.

        They are whole numbers, counted value by value: exact, and no copy of the images in doubles.
        """
        sums = []
        for channel in self.train.images.unbind(1):
            counts = torch.bincount(channel.flatten(), minlength=256).tolist()
            powers = ((n, n * value, n * value**2) for value, n in enumerate(counts))
            count, total, squares = (sum(column) for column in zip(*powers, strict=True))
            sums.append((count, total, squares))
        return sums
