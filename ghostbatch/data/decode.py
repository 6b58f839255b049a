"""Decoding, resizing and cropping of image files, as the worker processes of a feed do it."""

import gc
import os
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from ghostbatch.data.stream import PermutationStream
from ghostbatch.draws import generator
from ghostbatch.stop import STOP_SIGNALS

SIZE = 224
"""Default side of the square crop; the shorter side of an image is first resized to 8/7 of it."""

Crop = tuple[int, float, float]
"""The number of an image, and ``top`` and ``left`` of its crop, as `decode` takes them."""

Decoded = tuple[Tensor, Tensor, list[tuple[int, str]]]
"""A batch from a worker: images (M, size, size, 3), labels, and unreadable files with reasons."""


@dataclass(frozen=True)
class Files:
    """Paths of image files, and their labels."""

    paths: tuple[str, ...]
    labels: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.paths)

    def take(self, numbers: Sequence[int]) -> "Files":
        """Return the files of these numbers."""
        chosen = ((self.paths[number], self.labels[number]) for number in numbers)
        return Files(*zip(*chosen, strict=True))


def decode(path: str, top: float, left: float, size: int = SIZE) -> np.ndarray[Any, Any] | str:
    """Return a (size, size, 3) crop of an image whose shorter side was resized to 8/7 size.

    ``top`` and ``left`` are in [0, 1); 0.5 is the centre. Only the crop is resampled. If the file
    cannot be read, return the reason as a string.
    """
    from PIL import Image  # noqa: PLC0415 (only folders need it)

    try:
        with Image.open(path) as file:
            image = file.convert("RGB")
    except MemoryError:
        raise  # says nothing about the file
    except Exception as error:  # Pillow's decoders raise errors of many types
        return str(error).split(": ")[-1] or type(error).__name__
    shorter = round(size * 8 / 7)
    scale = min(image.size) / shorter
    wide, high = (max(shorter, int(side / scale)) for side in image.size)
    across, down = image.width / wide, image.height / high
    x, y = int(left * (wide - size + 1)), int(top * (high - size + 1))
    box = (x * across, y * down, (x + size) * across, (y + size) * down)
    return np.asarray(image.resize((size, size), Image.Resampling.BILINEAR, box=box))


@dataclass(frozen=True)
class Crops:
    """Which images each update reads, and where they are cropped and flipped."""

    stream: PermutationStream
    augment: bool

    def starting_at(self, update: int, positions: Sequence[slice]) -> Iterator[list[Crop]]:
        """Yield the crops at each of ``positions`` of every batch from ``update`` on, endlessly."""
        while True:
            indices, (top, left, _) = self.stream.indices(update), self.draw(update)
            for where in positions:
                chosen = (values[where].tolist() for values in (indices, top, left))
                yield list(zip(*chosen, strict=True))
            update += 1

    def draw(self, update: int) -> Tensor:
        """Return top, left and flip of every image of a batch, (3, batch), each in [0, 1)."""
        if not self.augment:
            return torch.full((3, self.stream.batch), 0.5, dtype=torch.float64)
        draw = generator(self.stream.seed, "augment", update)
        return torch.rand(3, self.stream.batch, generator=draw, dtype=torch.float64)


@dataclass(frozen=True)
class Decoder(Dataset[Decoded]):
    """The data set of the worker processes: a list of crops in, a batch of images out."""

    files: Files
    replace_bad: bool
    """Use the next readable image instead of a bad one."""
    size: int

    def __getitem__(self, crops: Sequence[Crop]) -> Decoded:
        images, labels, problems = [], [], []
        for index, top, left in crops:
            for step in range(len(self.files) if self.replace_bad else 1):
                chosen = (index + step) % len(self.files)
                image = decode(self.files.paths[chosen], top, left, self.size)
                if not isinstance(image, str):
                    images.append(image)
                    labels.append(self.files.labels[chosen])
                    break
                problems.append((chosen, image))
        stacked = np.stack(images) if images else np.zeros((0, self.size, self.size, 3), np.uint8)
        return torch.from_numpy(stacked), torch.tensor(labels, dtype=torch.long), problems


def begin_worker(_worker: int, parent: int) -> None:
    """Prepare a worker process: ignore stop signals, and exit if the parent has already ended."""
    for number in STOP_SIGNALS:
        if number != signal.SIGTERM:  # which PyTorch itself handles
            signal.signal(number, signal.SIG_IGN)
    gc.freeze()  # a worker must not finalise loaders inherited from its parent
    if os.getppid() != parent:
        os._exit(0)
