"""Image folders of any size, with files CLASS/IMAGE below ``train`` and ``val``.

Worker processes decode, resize and crop; the device flips and normalises. The order and the crops
are keyed by seed and update, so they do not depend on ranks, micro-batches, workers or resuming.
"""

import os
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from ghostbatch.data.datasets import HoldsOut, Info, Pixels
from ghostbatch.data.decode import SIZE, Crop, Crops, Decoded, Decoder, Files, begin_worker, decode
from ghostbatch.data.feed import MicroBatch, Normalise, to_device
from ghostbatch.data.skipped import OnBadImage, SkippedImages
from ghostbatch.data.stream import PermutationStream
from ghostbatch.draws import generator
from ghostbatch.errors import InputError, RankLocalError, RankLocalWarning

SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".ppm", ".webp", ".tif", ".tiff"})
SAMPLE = 1000
"""Number of images from which the mean and deviation of a folder's pixels are estimated."""


@dataclass(frozen=True)
class FolderData(HoldsOut):
    """The files of an image folder; none of them is read until it is needed."""

    name: str
    classes: int
    train: Files
    test: Files
    pixels: Pixels | None = None
    """Mean and deviation of each channel; estimated if None."""
    size: int = SIZE
    """Side of the images that the network sees."""
    held_out: bool = False
    """Whether ``test`` holds training images that were kept aside, and not the test set."""

    @property
    def info(self) -> Info:
        """The sizes that the network sees."""
        shape = (3, self.size, self.size)
        return Info(len(self.train), len(self.test), self.classes, shape, self.held_out)

    @cached_property
    def moments(self) -> tuple[Tensor, Tensor]:
        """Mean and deviation of each channel, by default over the centres of 1,000 images."""
        if self.pixels is not None:
            mean, deviation = (torch.tensor(p, dtype=torch.float64) for p in self.pixels)
            return mean, deviation
        order = torch.randperm(len(self.train), generator=generator(0, "pixels"))[:SAMPLE]
        crops = [decode(self.train.paths[i], 0.5, 0.5, self.size) for i in order.tolist()]
        good = [crop for crop in crops if not isinstance(crop, str)]  # the feed reports the others
        if not good:
            raise InputError("data", f"no image of {self.name} can be read", "check its files")
        pixels = torch.from_numpy(np.stack(good)).flatten(0, 2)
        counts = torch.stack([torch.bincount(channel, minlength=256) for channel in pixels.T])
        share, values = counts.double() / len(pixels), torch.arange(256, dtype=torch.float64)
        mean = share @ values
        return mean, (share @ values.square() - mean.square()).clamp(min=0).sqrt()


def list_folder(root: Path, name: str) -> FolderData:
    """List the images below ``root/train`` and ``root/val``; classes in alphabetical order."""
    parts = [root / "train", root / "val"]
    for part in parts:
        if not part.is_dir():
            remedy = "put images into train/CLASS and val/CLASS there, or name another folder"
            raise InputError("data", f"{name}: there is no folder {part}", remedy)
    classes, others = (sorted(e.name for e in part.iterdir() if e.is_dir()) for part in parts)
    if unknown := sorted({*others} - {*classes}):
        problem = f"{parts[1]} has classes that train lacks ({', '.join(unknown[:3])})"
        raise InputError("data", f"{name}: {problem}", "give both the same classes")
    train, test = (_list_images(name, part, classes) for part in parts)
    return FolderData(name, len(classes), train, test)


def _list_images(name: str, part: Path, classes: Sequence[str]) -> Files:
    found = [
        (str(path), label)
        for label, folder in enumerate(classes)
        for path in sorted((part / folder).rglob("*"))
        if path.suffix.lower() in SUFFIXES
    ]
    if not found:
        remedy = f"use {', '.join(sorted(SUFFIXES))}"
        raise InputError("data", f"{name}: {part} has no images", remedy)
    return Files(*zip(*found, strict=True))


class FolderFeed:
    """Batches of an image folder, decoded ahead of time by worker processes.

    Args:
        data: the image folder.
        batch, seed, device, dtype: as for `TensorFeed`.
        augment: crop the training images at random and flip half of them.
        workers: number of worker processes; with 0 this process decodes.
        on_bad_image: "fatal" raises an error; "skip" warns and uses the next image instead.
        skipped: where to note the images that are skipped.

    """

    test_batch = 250
    """Images of a batch of the test set."""

    def __init__(
        self,
        data: FolderData,
        *,
        batch: int,
        seed: int,
        augment: bool,
        device: torch.device,
        dtype: torch.dtype,
        workers: int = 2,
        on_bad_image: OnBadImage = "fatal",
        skipped: SkippedImages | None = None,
    ) -> None:
        self.crops = Crops(PermutationStream(len(data.train), batch, seed), augment)
        self.data, self.device = data, device
        self.workers, self.skip = workers, on_bad_image == "skip"
        self._normalise = Normalise(*data.moments, device, dtype)
        self._decoded: Iterator[Decoded] | None = None
        self._next: tuple[int, tuple[slice, ...]] | None = None
        """Update and positions of the batch that ``_decoded`` yields next."""
        self._loaders: WeakSet[Any] = WeakSet()
        """Iterators of DataLoaders, which have workers."""
        self._skipped = skipped or SkippedImages()

    def micro_batches(self, update: int, positions: Sequence[slice]) -> Iterator[MicroBatch]:
        """Yield the given positions of one training batch, one micro-batch per slice.

        The workers restart unless this call continues the one before.
        """
        slices = tuple(positions)
        if self._decoded is None or self._next != (update, slices):
            self.close()
            crops = self.crops.starting_at(update, slices)
            self._decoded = self._loader(Decoder(self.data.train, self.skip, self.data.size), crops)
        self._next = None  # until the caller has taken every micro-batch
        flips = self.crops.draw(update)[2]
        for where in slices:
            images, labels = self._to_device(next(self._decoded), "train")
            if self.crops.augment:
                flip = to_device(flips[where], self.device).view(-1, 1, 1, 1) < 0.5
                images = torch.where(flip, images.flip(3), images)
            yield MicroBatch(where, self._normalise(images), labels)
        self._next = (update + 1, slices)

    def test_batches(
        self, size: int | None = None, start: int = 0, step: int = 1
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield batches of centre crops of the test set: every ``step``-th from ``start`` on."""
        size = size or self.test_batch
        numbers = range(len(self.data.test))
        firsts = numbers[start * size :: step * size]
        crops = ([(i, 0.5, 0.5) for i in numbers[first : first + size]] for first in firsts)
        decoder = Decoder(self.data.test, replace_bad=False, size=self.data.size)
        for decoded in self._loader(decoder, crops):
            images, labels = self._to_device(decoded, "test")
            yield self._normalise(images), labels

    def close(self) -> None:
        """End the workers, also those of iterators that the traceback of an error holds."""
        self._decoded = None
        for loader in list(self._loaders):
            loader._shutdown_workers()

    def _loader(self, decoder: Decoder, crops: Iterator[list[Crop]]) -> Iterator[Decoded]:
        loader = DataLoader(
            decoder,
            batch_size=None,  # the decoder makes the batches
            sampler=crops,
            num_workers=self.workers,
            worker_init_fn=partial(begin_worker, parent=os.getpid()),
            pin_memory=self.device.type == "cuda",
        )
        iterator = iter(loader)
        if self.workers:
            self._loaders.add(iterator)
        return iterator

    def _to_device(self, decoded: Decoded, part: str) -> tuple[Tensor, Tensor]:
        """Return images and labels on the device; raise or warn about unreadable files."""
        images, labels, problems = decoded
        files = getattr(self.data, part)
        for number, reason in problems:
            problem = f"{files.paths[number]} cannot be read ({reason})"
            if not self.skip:
                remedy = "replace or remove it, or set on_bad_image to skip"
                raise RankLocalError("data", problem, remedy)
            if self._skipped.add(part, number, len(files)):
                warnings.warn(f"{problem}; it is skipped", RankLocalWarning, stacklevel=3)
        images = images.to(self.device, non_blocking=True).permute(0, 3, 1, 2)
        return images, labels.to(self.device, non_blocking=True)
