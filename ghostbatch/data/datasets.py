"""Data sets by name, as tensors of bytes."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files

import numpy as np
import torch
from torch import Tensor

from ghostbatch.data.augment import PadCropFlip
from ghostbatch.errors import InputError


@dataclass(frozen=True)
class Split:
    """Images (N, C, H, W) as uint8 and their labels."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class ImageData:
    """A data set: what to train on, what to test on, and how its images are treated."""

    name: str
    classes: int
    train: Split
    test: Split
    augmentation: PadCropFlip

    @cached_property
    def mean(self) -> Tensor:
        """Mean of each channel over the training images, in units of one pixel value."""
        return self.train.images.double().mean((0, 2, 3))

    @cached_property
    def deviation(self) -> Tensor:
        """Standard deviation of each channel over the training images."""
        return self.train.images.double().std((0, 2, 3), correction=0)


def digits() -> ImageData:
    """5,000 MNIST digits that come with the package: 4,000 to train on, 1,000 to test on."""
    with (files("ghostbatch.data") / "embedded" / "digits.npz").open("rb") as file:
        arrays = dict(np.load(file))

    def split(part: str) -> Split:
        images = torch.from_numpy(arrays[f"{part}_images"]).unsqueeze(1)
        return Split(images, torch.from_numpy(arrays[f"{part}_labels"]).long())

    return ImageData("digits", 10, split("train"), split("test"), PadCropFlip(pad=2, fill=0))


DATASETS: dict[str, Callable[[], ImageData]] = {"digits": digits}


def load(name: str) -> ImageData:
    """Load a data set by name."""
    if name not in DATASETS:
        raise InputError("data", f"{name!r} is unknown", f"choose one of {', '.join(DATASETS)}")
    return DATASETS[name]()
