"""From the number of an update to the tensors that the network sees."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ghostbatch.data.datasets import ImageData, Split
from ghostbatch.data.draws import generator
from ghostbatch.data.stream import PermutationStream


class Piece(NamedTuple):
    """A part of a training batch, and where in the whole batch it stands."""

    positions: slice
    images: Tensor
    labels: Tensor


class Feed:
    """Keeps a data set on the device as bytes and hands out normalised batches.

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
        self._train, self._test = (
            Split(split.images.to(device), split.labels.to(device))
            for split in (data.train, data.test)
        )
        shape = (1, -1, 1, 1)
        self._mean = data.mean.to(device, dtype).view(shape)
        self._scale = (1 / data.deviation).to(device, dtype).view(shape)

    def pieces(self, update: int, positions: Iterable[slice]) -> Iterator[Piece]:
        """Parts of one training batch, made as they are asked for.

        Order and augmentation are drawn for the whole batch, so a sample's do not depend on how it
        is cut.
        """
        indices = self.stream.indices(update)
        if self.augmentation is not None:
            draw = generator(self.seed, "augment", update)
            crops = self.augmentation.draw(self.stream.batch, draw)
        for where in positions:
            chosen = indices[where].to(self._train.labels.device)
            images = self._train.images[chosen]
            if self.augmentation is not None:
                images = self.augmentation(images, crops[:, where])
            yield Piece(where, self._normalise(images), self._train.labels[chosen])

    def test_batches(
        self, size: int = 1000, start: int = 0, step: int = 1
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """The test set in order, in pieces; every ``step``-th of them from ``start`` on."""
        for first in range(start * size, len(self._test), step * size):
            part = slice(first, first + size)
            yield self._normalise(self._test.images[part]), self._test.labels[part]

    def _normalise(self, images: Tensor) -> Tensor:
        return (images.to(self._mean.dtype) - self._mean) * self._scale
