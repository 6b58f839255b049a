"""Feeds: return the normalised batches of an update, on the device."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ghostbatch.data.datasets import ImageData
from ghostbatch.data.stream import PermutationStream
from ghostbatch.draws import generator


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
    """Turns bytes into floats of mean 0 and deviation 1; channels_last on a GPU."""

    def __init__(
        self, mean: Tensor, deviation: Tensor, device: torch.device, dtype: torch.dtype
    ) -> None:
        shape = (1, -1, 1, 1)
        self._mean = mean.to(device, dtype).view(shape)
        divisor = torch.where(deviation > 0, deviation, 1.0)  # a constant channel becomes 0
        self._scale = (1 / divisor).to(device, dtype).view(shape)
        self._layout = torch.channels_last if device.type == "cuda" else torch.contiguous_format

    def __call__(self, images: Tensor) -> Tensor:
        """Return ``images`` (N, C, H, W) normalised."""
        floats = images.to(self._mean.dtype, memory_format=self._layout)
        return floats.sub_(self._mean).mul_(self._scale)


class TensorFeed:
    """Keeps a data set on the device as bytes and gathers, crops and flips batches there.

    Args:
        data: the data set.
        batch: samples per update, over all ranks.
        seed: seeds the order and the augmentation.
        augment: apply the data set's augmentation to the training images.
        device: where the batches are made.
        dtype: dtype of the images.

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
    ) -> None:
        self.stream = PermutationStream(len(data.train), batch, seed)
        self.augmentation = data.augmentation if augment else None
        self._device = device
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
            chosen = draws[0, where]
            if self.augmentation is None:
                images = self._train.images[chosen]
            else:
                images = self.augmentation(self._train.images, chosen, draws[1:, where])
            yield MicroBatch(where, self._normalise(images), self._train.labels[chosen])

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
