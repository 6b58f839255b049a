"""From the number of an update to the tensors that the network sees."""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ghostbatch.data.datasets import ImageData
from ghostbatch.data.stream import PermutationStream
from ghostbatch.draws import generator


class MicroBatch(NamedTuple):
    """A part of a training batch, and where in the whole batch it stands."""

    positions: slice
    images: Tensor
    labels: Tensor


class Feed(Protocol):
    """What a run asks of its data. Draws are made for whole batches, however they are cut."""

    def micro_batches(self, update: int, positions: Sequence[slice]) -> Iterable[MicroBatch]:
        """Parts of one training batch, made as they are asked for."""

    def test_batches(
        self, size: int = 1000, start: int = 0, step: int = 1
    ) -> Iterable[tuple[Tensor, Tensor]]:
        """The test set in order, in batches; every ``step``-th of them from ``start`` on."""

    def close(self) -> None:
        """Let go of whatever it holds."""


class Normalise:
    """Bytes to numbers of mean zero and deviation one, in the layout that suits the device."""

    def __init__(
        self, mean: Tensor, deviation: Tensor, device: torch.device, dtype: torch.dtype
    ) -> None:
        shape = (1, -1, 1, 1)
        self._mean = mean.to(device, dtype).view(shape)
        spread = torch.where(deviation > 0, deviation, 1.0)  # of a channel that never changes
        self._scale = (1 / spread).to(device, dtype).view(shape)
        fast = device.type == "cuda"
        self._layout = torch.channels_last if fast else torch.contiguous_format

    def __call__(self, images: Tensor) -> Tensor:
        """Normalise (N, C, H, W)."""
        numbers = images.to(self._mean.dtype, memory_format=self._layout)
        return numbers.sub_(self._mean).mul_(self._scale)


class TensorFeed:
    """Keeps a data set on the device as bytes; a batch is gathered there, crops and flips included.

    Args:
        data: the data set.
        batch: samples per update, over all ranks.
        seed: of the order and the augmentation.
        augment: apply the data set's augmentation to the training images.
        device: where the batches are made.
        dtype: of the images handed out.

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
        self.seed = seed
        self.augmentation = data.augmentation if augment else None
        self._device = device
        self._train, self._test = data.train.to(device), data.test.to(device)
        self._normalise = Normalise(data.mean, data.deviation, device, dtype)

    def micro_batches(self, update: int, positions: Iterable[slice]) -> Iterator[MicroBatch]:
        """Parts of one training batch, made as they are asked for."""
        indices = self.stream.indices(update)
        if self.augmentation is not None:
            draw = generator(self.seed, "augment", update)
            crops = self.augmentation.draw(self.stream.batch, draw)
        for where in positions:
            chosen = indices[where].to(self._device)
            if self.augmentation is None:
                images = self._train.images[chosen]
            else:
                draws = crops[:, where].to(self._device)
                images = self.augmentation(self._train.images, chosen, draws)
            yield MicroBatch(where, self._normalise(images), self._train.labels[chosen])

    def test_batches(
        self, size: int = 1000, start: int = 0, step: int = 1
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """The test set in order, in batches; every ``step``-th of them from ``start`` on."""
        for first in range(start * size, len(self._test), step * size):
            part = slice(first, first + size)
            yield self._normalise(self._test.images[part]), self._test.labels[part]

    def close(self) -> None:
        """There is nothing to let go of."""
