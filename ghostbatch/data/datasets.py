"""Types of a data set in memory: its images as bytes, its sizes, and the held-out split."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ghostbatch.data.augment import PadCropFlip
from ghostbatch.draws import key
from ghostbatch.errors import InputError

Pixels = tuple[tuple[float, ...], tuple[float, ...]]
"""Mean and standard deviation of each channel, on the scale of 0 to 255."""


@dataclass(frozen=True)
class Info:
    """The sizes of a data set, so that a run can be planned without its files."""

    samples: int
    """Training images."""
    test_samples: int
    """Images for evaluation."""
    classes: int
    """Labels are 0 to classes - 1."""
    shape: tuple[int, int, int]
    """Channels, height and width of an image."""
    held_out: bool = False
    """Whether evaluation is on training images that were kept aside, not on the test set."""

    def hold_out(self, count: int) -> "Info":
        """Return the sizes after ``count`` training images were kept aside for evaluation.

        >>> Info(60_000, 10_000, 10, (1, 28, 28)).hold_out(5000).samples
        55000
        """
        check_holdout(count)
        if self.held_out:
            raise InputError("holdout", "images are held out already", "hold out all at once")
        if not 0 < count < self.samples:
            problem = f"{count:,} of {self.samples:,} training images cannot be held out"
            raise InputError("holdout", problem, f"use 1 to {self.samples - 1:,}")
        return replace(self, samples=self.samples - count, test_samples=count, held_out=True)


def check_holdout(count: int) -> None:
    """Refuse a value that is not a number of images."""
    if not isinstance(count, int) or count < 0:
        raise InputError("holdout", f"{count!r} is no number of images", "use 5000, or 0 for none")


def choose_held_out(samples: int, count: int) -> tuple[list[int], list[int]]:
    """Return the numbers of the training images that stay, and of the ``count`` kept aside.

    Those with the least hashes are kept aside, so they are the same for every seed, run, platform
    and version, come from the whole training set, and contain those of any smaller ``count``.

    >>> choose_held_out(10, 3)
    ([0, 1, 2, 3, 5, 7, 8], [4, 6, 9])
    """
    order = sorted(range(samples), key=lambda number: key(0, "holdout", number))
    return sorted(order[count:]), sorted(order[:count])


@dataclass(frozen=True)
class Split:
    """Images (N, C, H, W) as uint8 and their labels."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, numbers: list[int]) -> "Split":
        """Return the images of these numbers."""
        return Split(self.images[numbers], self.labels[numbers])

    def to(self, device: torch.device) -> "Split":
        """Return a copy on ``device`` whose images are channels_last."""
        images = self.images.to(device, memory_format=torch.channels_last)
        return Split(images, self.labels.to(device))


class HoldsOut:
    """A data set, with fields ``train``, ``test`` and ``held_out``, that can keep images aside."""

    def hold_out(self: Any, count: int) -> Any:
        """Return the data set with ``count`` training images in place of its test set.

        The choice is `choose_held_out`'s. Mean and deviation are those of the remaining images.
        """
        self.info.hold_out(count)  # refuses wrong counts
        rest, kept = (self.train.take(part) for part in choose_held_out(len(self.train), count))
        return replace(self, train=rest, test=kept, held_out=True)


@dataclass(frozen=True)
class ImageData(HoldsOut):
    """A data set in memory: training images, test images and the augmentation."""

    name: str
    classes: int
    train: Split
    test: Split
    augmentation: PadCropFlip
    held_out: bool = False
    """Whether ``test`` holds training images that were kept aside, and not the test set."""
    pixels: Pixels | None = None
    """Mean and deviation of each channel; None: those of the training images."""

    @property
    def info(self) -> Info:
        """The sizes of the tensors."""
        channels, height, width = self.train.images.shape[1:]
        shape = (channels, height, width)
        return Info(len(self.train), len(self.test), self.classes, shape, self.held_out)

    @cached_property
    def mean(self) -> Tensor:
        """Mean of each channel, on the scale of 0 to 255."""
        if self.pixels:
            return torch.tensor(self.pixels[0], dtype=torch.float64)
        means = [total / count for count, total, _ in self._power_sums]
        return torch.tensor(means, dtype=torch.float64)

    @cached_property
    def deviation(self) -> Tensor:
        """Standard deviation of each channel."""
        if self.pixels:
            return torch.tensor(self.pixels[1], dtype=torch.float64)
        variances = [(n * squares - total**2) / n**2 for n, total, squares in self._power_sums]
        return torch.tensor(variances, dtype=torch.float64).sqrt()

    @cached_property
    def _power_sums(self) -> list[list[int]]:
        """Number of pixels, sum and sum of squares of each channel, as exact integers."""
        channels = self.train.images.unbind(1)
        histograms = [torch.bincount(c.flatten(), minlength=256).tolist() for c in channels]
        return [[sum(n * v**k for v, n in enumerate(h)) for k in range(3)] for h in histograms]
