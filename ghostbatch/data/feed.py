"""From the number of an update to the tensors that the network sees."""

import torch
from torch import Tensor

from ghostbatch.data.datasets import ImageData, Split
from ghostbatch.data.draws import generator
from ghostbatch.data.stream import PermutationStream


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

    def train_batch(self, update: int) -> tuple[Tensor, Tensor]:
        """Images and labels of one training batch."""
        indices = self.stream.indices(update).to(self._train.labels.device)
        images = self._train.images[indices]
        if self.augmentation is not None:
            images = self.augmentation(images, generator(self.seed, "augment", update))
        return self._normalise(images), self._train.labels[indices]

    def test_batches(self, size: int = 1000) -> list[tuple[Tensor, Tensor]]:
        """The test set in order, in pieces."""
        return [
            (self._normalise(images), labels)
            for images, labels in zip(
                self._test.images.split(size), self._test.labels.split(size), strict=True
            )
        ]

    def _normalise(self, images: Tensor) -> Tensor:
        return (images.to(self._mean.dtype) - self._mean) * self._scale
