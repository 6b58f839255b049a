"""Image folders of any size: CLASS/IMAGE below ``train`` and ``val``, decoded by worker processes.

Workers decode, resize and crop; bytes travel through pinned memory; flipping and normalising are
done on the device. The order and every crop are those of the stream, so a run resumes at the exact
batch and does not depend on ranks, micro-batches or workers.
"""

import os
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from ghostbatch.data.datasets import Info
from ghostbatch.data.decode import CROP, Decoded, Decoder, Files, Order, Orders, WorkerInit, decode
from ghostbatch.data.feed import MicroBatch, Normalise
from ghostbatch.data.stream import PermutationStream
from ghostbatch.draws import generator
from ghostbatch.errors import InputError, RankLocalError, RankLocalWarning

OnBadImage = Literal["fatal", "skip"]

SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".ppm", ".webp", ".tif", ".tiff"})
SAMPLE = 1000
"""Images from which the mean and deviation of a folder's pixels are taken."""


@dataclass(frozen=True)
class FolderData:
    """A folder of images, listed but not read."""

    name: str
    classes: int
    train: Files
    test: Files
    pixels: tuple[tuple[float, ...], tuple[float, ...]] | None = None
    """Mean and deviation of each channel, where they are known beforehand."""

    @property
    def info(self) -> Info:
        """The sizes, as the network will see them."""
        return Info(len(self.train), len(self.test), self.classes, (3, CROP, CROP))

    @cached_property
    def moments(self) -> tuple[Tensor, Tensor]:
        """Mean and deviation of each channel: over the centres of up to a thousand images."""
        if self.pixels is not None:
            mean, deviation = (torch.tensor(p, dtype=torch.float64) for p in self.pixels)
            return mean, deviation
        order = torch.randperm(len(self.train), generator=generator(0, "pixels"))[:SAMPLE]
        crops = [decode(self.train.paths[i], 0.5, 0.5) for i in order.tolist()]
        good = [crop for crop in crops if not isinstance(crop, str)]  # a feed reports the others
        if not good:
            raise InputError("data", f"no image of {self.name} can be read", "check its files")
        pixels = torch.from_numpy(np.stack(good)).flatten(0, 2)
        counts = torch.stack([torch.bincount(channel, minlength=256) for channel in pixels.T])
        share, values = counts.double() / len(pixels), torch.arange(256, dtype=torch.float64)
        mean = share @ values
        return mean, (share @ values.square() - mean.square()).clamp(min=0).sqrt()


def list_folder(root: Path, name: str) -> FolderData:
    """Find the images below ``root/train`` and ``root/val``; classes are in alphabetical order."""
    parts = [root / "train", root / "val"]
    for part in parts:
        if not part.is_dir():
            raise InputError(
                "data",
                f"{name}: there is no folder {part}",
                "put images into train/CLASS and val/CLASS there, or name another folder",
            )
    classes = sorted(entry.name for entry in parts[0].iterdir() if entry.is_dir())
    unknown = {e.name for e in parts[1].iterdir() if e.is_dir()} - set(classes)
    if unknown:
        raise InputError(
            "data",
            f"{name}: {parts[1]} has classes that train has not ({', '.join(sorted(unknown)[:3])})",
            "give both the same classes",
        )
    train, test = (_list(part, classes) for part in parts)
    for part, found in zip(parts, (train, test), strict=True):
        if not len(found):
            suffixes = ", ".join(sorted(SUFFIXES))
            raise InputError("data", f"{name}: {part} has no images", f"use {suffixes}")
    return FolderData(name, len(classes), train, test)


def _list(part: Path, classes: Sequence[str]) -> Files:
    found = [
        (str(path), label)
        for label, name in enumerate(classes)
        for path in sorted((part / name).rglob("*"))
        if path.suffix.lower() in SUFFIXES
    ]
    return Files(tuple(path for path, _ in found), tuple(label for _, label in found))


class FolderFeed:
    """Batches of an image folder; arguments as of `TensorFeed`, and two more.

    Args:
        data: the folder.
        batch: samples per update, over all ranks.
        seed: of the order and the augmentation.
        augment: crop at random places and flip half of the training images.
        device: where the batches end.
        dtype: of the images handed out.
        workers: processes that decode.
        on_bad_image: "fatal", or "skip": say so, and give its place to the next image.

    """

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
    ) -> None:
        self.orders = Orders(PermutationStream(len(data.train), batch, seed), seed, augment)
        self.data, self.augment, self.device = data, augment, device
        self.workers, self.skip = workers, on_bad_image == "skip"
        self._normalise = Normalise(*data.moments, device, dtype)
        self._ahead: Iterator[Decoded] | None = None
        self._next: tuple[int, tuple[slice, ...]] | None = None
        self._said: set[str] = set()

    def micro_batches(self, update: int, positions: Sequence[slice]) -> Iterator[MicroBatch]:
        """Parts of one training batch; the workers are ahead by a few of them."""
        wanted = tuple(positions)
        if self._ahead is None or self._next != (update, wanted):
            self.close()
            self._ahead = self._loader(self.data.train, self.orders.since(update, wanted), True)
        self._next = None  # until all of this update has been taken
        flips = self.orders.draw(update)[2]
        for where in wanted:
            images, labels = self._take(next(self._ahead))
            if self.augment:
                flip = flips[where].to(self.device).view(-1, 1, 1, 1) < 0.5
                images = torch.where(flip, images.flip(3), images)
            yield MicroBatch(where, self._normalise(images), labels)
        self._next = (update + 1, wanted)

    def test_batches(
        self, size: int = 250, start: int = 0, step: int = 1
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """The centres of the test images in order, in batches."""
        firsts = range(start * size, len(self.data.test), step * size)
        last = len(self.data.test)
        orders = ([Order(i, 0.5, 0.5) for i in range(f, min(f + size, last))] for f in firsts)
        for decoded in self._loader(self.data.test, orders, False):
            images, labels = self._take(decoded)
            yield self._normalise(images), labels

    def close(self) -> None:
        """End the workers."""
        self._ahead = None

    def _loader(self, files: Files, orders: Iterator[list[Order]], training: bool) -> Any:
        loader: DataLoader[Decoded] = DataLoader(
            Decoder(files, replace_bad=training and self.skip),  # type: ignore[arg-type]
            batch_sampler=orders,
            num_workers=self.workers,
            collate_fn=_as_it_is,
            worker_init_fn=WorkerInit(os.getpid()),
            pin_memory=self.device.type == "cuda",
        )
        return iter(loader)

    def _take(self, decoded: Decoded) -> tuple[Tensor, Tensor]:
        """To the device, and say what could not be read."""
        images, labels, problems = decoded
        if problems and not self.skip:
            raise RankLocalError(
                "data", problems[0], "replace or remove it, or use --on-bad-image skip"
            )
        for problem in sorted(set(problems) - self._said):
            warnings.warn(f"{problem}; it is skipped", RankLocalWarning, stacklevel=3)
        self._said.update(problems)
        images = images.to(self.device, non_blocking=True).permute(0, 3, 1, 2)
        return images, labels.to(self.device, non_blocking=True)


def _as_it_is(batch: Any) -> Any:
    return batch
