"""The order of the samples: one endless stream of permutations, cut into full batches."""

import torch
from torch import Tensor

from ghostbatch.draws import generator


class PermutationStream:
    """Batch ``u`` holds positions u B to (u + 1) B of a stream of fresh permutations.

    No sample is dropped and no batch is ragged: a batch may straddle two permutations. The stream
    has no state: any update can be asked for at any time.

    Args:
        samples: size of the training set.
        batch: samples per update, over all ranks.
        seed: seeds the permutations.

    """

    def __init__(self, samples: int, batch: int, seed: int) -> None:
        self.samples = samples
        self.batch = batch
        self.seed = seed
        self._permutations: dict[int, Tensor] = {}

    def indices(self, update: int) -> Tensor:
        """Return the indices of the samples of one batch, in order."""
        start, end = update * self.batch, (update + 1) * self.batch
        first, last = start // self.samples, (end - 1) // self.samples
        parts = [
            self._permutation(p)[max(0, start - p * self.samples) : end - p * self.samples]
            for p in range(first, last + 1)
        ]
        self._permutations = {last: self._permutations[last]}  # the next batch may begin in it
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _permutation(self, number: int) -> Tensor:
        if number not in self._permutations:
            draw = generator(self.seed, "order", number)
            self._permutations[number] = torch.randperm(self.samples, generator=draw)
        return self._permutations[number]
