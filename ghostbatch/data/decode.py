"""What worker processes do for `folder`: decode images, resize and crop them."""

import gc
import os
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ghostbatch.data.stream import PermutationStream
from ghostbatch.draws import generator

RESIZE, CROP = 256, 224
"""The shorter side after resizing, and the square that is cut out."""


@dataclass(frozen=True)
class Files:
    """Paths of images and their labels."""

    paths: tuple[str, ...]
    labels: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.paths)


def decode(path: str, top: float, left: float) -> np.ndarray[Any, Any] | str:
    """The square of an image, (224, 224, 3), after its shorter side is resized to 256.

    ``top`` and ``left`` in [0, 1) say where; 0.5 is the centre. Only the square is resampled, from
    the part of the image that it shows. A file that cannot be read gives the reason instead.
    """
    from PIL import Image  # noqa: PLC0415 (only folders need it)

    try:
        with Image.open(path) as file:
            image = file.convert("RGB")
    except Exception as error:  # Pillow's decoders raise what they like
        return str(error).split(": ")[-1] or type(error).__name__
    scale = min(image.size) / RESIZE
    wide, high = (max(RESIZE, int(side / scale)) for side in image.size)
    across, down = image.width / wide, image.height / high
    x, y = int(left * (wide - CROP + 1)), int(top * (high - CROP + 1))
    box = (x * across, y * down, (x + CROP) * across, (y + CROP) * down)
    square = image.resize((CROP, CROP), Image.Resampling.BILINEAR, box=box)
    return np.asarray(square)


class Order(NamedTuple):
    """One image to decode, and how."""

    image: int
    top: float
    left: float


@dataclass(frozen=True)
class Orders:
    """What is to be decoded for each update; it knows nothing of who decodes it."""

    stream: PermutationStream
    seed: int
    augment: bool

    def since(self, update: int, positions: Sequence[slice]) -> Iterator[list[Order]]:
        """Those of some pieces of every batch from ``update`` on, without end."""
        while True:
            indices, (top, left, _) = self.stream.indices(update), self.draw(update)
            for where in positions:
                chosen = (values[where].tolist() for values in (indices, top, left))
                yield [Order(*order) for order in zip(*chosen, strict=True)]
            update += 1

    def draw(self, update: int) -> Tensor:
        """Top, left and flip of every image of a batch, each in [0, 1)."""
        if not self.augment:
            return torch.full((3, self.stream.batch), 0.5, dtype=torch.float64)
        draw = generator(self.seed, "augment", update)
        return torch.rand(3, self.stream.batch, generator=draw, dtype=torch.float64)


class Decoded(NamedTuple):
    """A batch from a worker: images (M, 224, 224, 3), labels, and what could not be read."""

    images: Tensor
    labels: Tensor
    problems: list[str]


class Decoder:
    """The data set of the worker processes: a batch of orders in, a batch of images out."""

    def __init__(self, files: Files, replace_bad: bool) -> None:
        self.files = files
        self.replace_bad = replace_bad

    def __getitems__(self, orders: Sequence[Order]) -> Decoded:
        """Decode a whole batch; a bad image's place goes to the next that is good, if wanted."""
        images, labels, problems = [], [], []
        for index, top, left in orders:
            for step in range(len(self.files) if self.replace_bad else 1):
                chosen = (index + step) % len(self.files)
                image = decode(self.files.paths[chosen], top, left)
                if not isinstance(image, str):
                    images.append(image)
                    labels.append(self.files.labels[chosen])
                    break
                problems.append(f"{self.files.paths[chosen]} cannot be read ({image})")
        stacked = np.stack(images) if images else np.zeros((0, CROP, CROP, 3), np.uint8)
        return Decoded(torch.from_numpy(stacked), torch.tensor(labels, dtype=torch.long), problems)


class WorkerInit:
    """Begins a worker: Ctrl-C is its parent's business, and it does not outlive it."""

    def __init__(self, parent: int) -> None:
        self.parent = parent

    def __call__(self, _worker: int) -> None:
        """Called in the worker; if its parent is gone already, nobody else would tell it."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # for SIGTERM it has PyTorch's handler
        gc.freeze()  # its parent's other loaders are not this process's to clean up
        if os.getppid() != self.parent:
            os._exit(0)
