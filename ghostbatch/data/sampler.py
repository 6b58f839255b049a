"""The exact stream of batches as a batch sampler, for a DataLoader in anyone's loop."""

import os
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Sampler

from ghostbatch.data.split import BatchSplit
from ghostbatch.data.stream import PermutationStream
from ghostbatch.errors import InputError, check_positive, check_positive_or_none


class ExactBatchSampler(Sampler[list[int]]):
    """Yields the micro-batches of one rank, in the order of `gb.train`; never drops a sample.

    Each batch is the next part of one endless stream of permutations. It is cut into micro-batches,
    and each micro-batch into contiguous shards, one per rank. So all ranks together see the same
    batches for any number of ranks and any micro-batch, and ghosts that divide a shard hold the
    same samples. Every list has ``batch_size`` indices.

    One pass over the loader has a fixed number of updates, by default the nearest to an epoch, and
    the next pass continues where it ended: do not call ``set_epoch``. A pass that was broken off
    begins again, unless the loader's workers have already fetched the rest of it.

    To resume, call `set_update` with the number of updates done. The StatefulDataLoader of
    torchdata needs no call: it saves and restores the position.

    Args:
        samples: size of the training set.
        batch: samples per update, over all ranks.
        micro: samples per backward pass, over all ranks; None is the batch.
        seed: seeds the order; `gb.train` has the same order for the same seed.
        updates: updates of one pass; None is an epoch, rounded.
        rank: the rank whose samples to yield; None asks torch.distributed.
        ranks: number of ranks; None asks torch.distributed. Both are asked when the sampler is
            built; without a process group there is one rank.

    >>> sampler = ExactBatchSampler(samples=10, batch=4, micro=2, seed=0)
    >>> len(sampler), sum(sampler, [])  # three updates of two micro-batches
    (6, [2, 1, 6, 3, 7, 0, 4, 9, 8, 5, 5, 0])
    >>> second = ExactBatchSampler(samples=10, batch=4, micro=2, seed=0, rank=1, ranks=2)
    >>> sum(second, [])
    [1, 3, 0, 9, 5, 0]

    """

    def __init__(
        self,
        samples: int,
        batch: int,
        *,
        micro: int | None = None,
        seed: int = 0,
        updates: int | None = None,
        rank: int | None = None,
        ranks: int | None = None,
    ) -> None:
        check_positive(samples=samples, batch=batch)
        check_positive_or_none(updates=updates, ranks=ranks)
        rank, ranks = _find_ranks(rank, ranks)
        self.stream = PermutationStream(samples, batch, seed)
        split = BatchSplit(batch, batch if micro is None else micro, ranks, multiple_of=1)
        split.check()
        self.batch_size = split.shard
        """Samples in each list, under PyTorch's name."""
        self.updates = updates or max(1, (2 * samples + batch) // (2 * batch))
        """Updates of one pass."""
        self.positions = split.positions(rank)
        """The positions in the batch that this rank yields, one slice for each micro-batch."""
        self.update = 0
        """The update with which the next pass begins."""

    def __len__(self) -> int:
        """Return the number of micro-batches of a pass."""
        return self.updates * len(self.positions)

    def __iter__(self) -> Iterator[list[int]]:
        """Return one pass: from `update` to the next multiple of ``updates``."""
        return _Pass(self)

    def set_update(self, update: int) -> None:
        """Begin the next pass with the 0-based ``update``; it ends where it would have ended.

        So a loop over epochs that is resumed in the middle of one completes that first.
        """
        if update < 0:
            raise InputError("update", f"{update} is below 0", "give the number of updates done")
        self.update = update


class _Pass(Iterator[list[int]]):
    """One pass over a sampler; StatefulDataLoader saves and restores its position."""

    def __init__(self, sampler: ExactBatchSampler) -> None:
        self._sampler = sampler
        self._update, self._part = sampler.update, 0
        self._end = (sampler.update // sampler.updates + 1) * sampler.updates
        self._batch: Tensor | None = None

    def __next__(self) -> list[int]:
        if self._update == self._end:
            raise StopIteration
        positions = self._sampler.positions
        if self._batch is None:
            self._batch = self._sampler.stream.indices(self._update)
        indices: list[int] = self._batch[positions[self._part]].tolist()
        self._part += 1
        if self._part == len(positions):
            self._update, self._part, self._batch = self._update + 1, 0, None
            self._note_end()
        return indices

    def _note_end(self) -> None:
        if self._update == self._end:
            self._sampler.update = self._end

    def state_dict(self) -> dict[str, Any]:
        return {"update": self._update, "part": self._part, "end": self._end}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._update, self._part = state_dict["update"], state_dict["part"]
        self._end, self._batch = state_dict["end"], None
        self._note_end()


def _find_ranks(rank: int | None, ranks: int | None) -> tuple[int, int]:
    """Return the rank and the number of ranks: those given, or those of torch.distributed."""
    if ranks is None:
        if dist.is_available() and dist.is_initialized():
            rank, ranks = dist.get_rank() if rank is None else rank, dist.get_world_size()
        elif (started := int(os.environ.get("WORLD_SIZE", "1"))) > 1:
            problem = f"{started} processes were started, but there is no process group yet"
            raise InputError("ranks", problem, "build the sampler later, or give rank and ranks")
        else:
            ranks = 1
    if rank is None and ranks > 1:
        raise InputError("rank", f"is missing for {ranks} ranks", "give rank and ranks, or neither")
    rank = rank or 0
    if not 0 <= rank < ranks:
        raise InputError("rank", f"{rank} is not one of {ranks} ranks", f"use 0 to {ranks - 1}")
    return rank, ranks
