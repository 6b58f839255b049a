"""Feeds: return the normalised batches of an update, on the device."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ghostbatch.data.datasets import ImageData
from ghostbatch.data.stream import PermutationStream
from ghostbatch.draws import generator
from ghostbatch.ops.backends.base import has_triton
from ghostbatch.ops.patches import patches


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor from the CPU to the device without waiting for a GPU."""
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


class MicroBatch(NamedTuple):
    """A part of a training batch, and its positions in that batch."""

    positions: slice
    images: Tensor
    labels: Tensor


class Normalise:
    """Turns bytes into floats of mean 0 and deviation 1; channels_last on a GPU.

    It computes in fp32, or in fp64 if that is ``dtype``.
    """

    def __init__(
        self, mean: Tensor, deviation: Tensor, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.dtype = dtype
        wide = torch.promote_types(dtype, torch.float32)
        divisor = torch.where(deviation > 0, deviation, 1.0)  # a constant channel becomes 0
        self.mean, self.scale = mean.to(device, wide), (1 / divisor).to(device, wide)
        self._layout = torch.channels_last if device.type == "cuda" else torch.contiguous_format

    def __call__(self, images: Tensor) -> Tensor:
        """Return ``images`` (N, C, H, W) normalised."""
        floats = images.to(self.mean.dtype, memory_format=self._layout)
        shape = (1, -1, 1, 1)
        return floats.sub_(self.mean.view(shape)).mul_(self.scale.view(shape)).to(self.dtype)


class TensorFeed:
    """Keeps a data set on the device as bytes and gathers, crops and flips batches there.

    Args:
        data: the data set.
        batch: samples per update, over all ranks.
        seed: seeds the order and the augmentation.
        augment: apply the data set's augmentation to the training images.
        device: where the batches are made.
        dtype: dtype of the images.
        patch: make the `patches` of this many rows and columns of the training images.

    """

    def __init__(
        self,
        data: ImageData,
        *,
        batch: int,
        seed: int,
        augment: bool,
        device: torch.device,
        dtype: torch.dtype,
        patch: int = 1,
    ) -> None:
        self.stream = PermutationStream(len(data.train), batch, seed)
        self.augmentation = data.augmentation if augment else None
        self._device, self._patch = device, patch
        self._train, self._test = data.train.to(device), data.test.to(device)
        self._normalise = Normalise(data.mean, data.deviation, device, dtype)
        self.test_batch = 5000 if device.type == "cuda" else 1000
        """Images of a batch of the test set."""

    def micro_batches(self, update: int, positions: Iterable[slice]) -> Iterator[MicroBatch]:
        """Yield the given positions of one training batch, one micro-batch per slice."""
        return self.make(to_device(self.draw(update), self._device), positions)

    def draw(self, update: int) -> Tensor:
        """Draw a batch: (1, batch) numbers of images, or (4, batch) with top, left and flip."""
        chosen = self.stream.indices(update).unsqueeze(0)
        if self.augmentation is None:
            return chosen
        draw = generator(self.stream.seed, "augment", update)
        return torch.cat([chosen, self.augmentation.draw(self.stream.batch, draw)])

    def make(self, draws: Tensor, positions: Iterable[slice]) -> Iterator[MicroBatch]:
        """Yield the given positions of the batch that ``draws``, on the device, describes."""
        for where in positions:
            labels = self._train.labels[draws[0, where]]
            yield MicroBatch(where, self._make_images(draws[:, where]), labels)

    def _make_images(self, draws: Tensor) -> Tensor:
        """Return normalised images, or their patches, by one kernel where it applies."""
        normalise, augmentation, images = self._normalise, self.augmentation, self._train.images
        if has_triton(normalise.mean):
            from ghostbatch.ops.batch import make_batch  # noqa: PLC0415 (imports triton)

            return make_batch(
                *(images, draws, normalise.mean, normalise.scale),
                pad=augmentation.pad if augmentation else 0,
                fill=augmentation.fill if augmentation else 0,
                patch=self._patch,
                dtype=normalise.dtype,
            )
        chosen, crops = draws[0], draws[1:]
        images = normalise(augmentation(images, chosen, crops) if augmentation else images[chosen])
        return images if self._patch == 1 else patches(images, self._patch)

    def test_batches(
        self, size: int | None = None, start: int = 0, step: int = 1
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield batches of the test set in order: every ``step``-th one from ``start`` on."""
        size = size or self.test_batch
        for first in range(start * size, len(self._test), step * size):
            part = slice(first, first + size)
            yield self._normalise(self._test.images[part]), self._test.labels[part]

    def close(self) -> None:
        """Do nothing: there are no workers."""
