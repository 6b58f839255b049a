"""Batches cut into pieces are the batches that were cut."""

import pytest
import torch

from ghostbatch.data import TensorFeed, load
from ghostbatch.train.split import BatchSplit


@pytest.fixture(scope="module")
def data():
    return load("digits")


def feed(data):
    where = {"device": torch.device("cpu"), "dtype": torch.float64}
    return TensorFeed(data, batch=96, seed=3, augment=True, **where)


@pytest.mark.parametrize(("micro", "world"), [(96, 2), (48, 1), (48, 2), (32, 4), (96, 3)])
@pytest.mark.parametrize("update", [0, 41, 7])  # 41 straddles two permutations
def test_ranks_and_micro_batches_partition_every_batch_in_order(data, micro, world, update):
    (whole,) = feed(data).pieces(update, [slice(0, 96)])
    cut = BatchSplit(batch=96, micro=micro, world=world, unit=1)
    pieces = [p for r in range(world) for p in feed(data).pieces(update, cut.pieces(r))]
    pieces.sort(key=lambda piece: piece.positions.start)
    assert torch.cat([p.images for p in pieces]).equal(whole.images)
    assert torch.cat([p.labels for p in pieces]).equal(whole.labels)


def test_a_feed_that_starts_in_the_middle_gives_what_one_from_the_start_gives(data):
    early, late = feed(data), feed(data)
    for update in range(6):
        (piece,) = early.pieces(update, [slice(0, 96)])
    (again,) = late.pieces(5, [slice(0, 96)])
    assert again.images.equal(piece.images)


def test_images_are_gathered_where_they_live_in_one_operation(data):
    """Nothing of the batch goes through Python: what is made does not grow with its size."""
    calls = []
    index = torch.Tensor.__getitem__

    def counted(self, *where):
        calls.append(self.shape)
        return index(self, *where)

    torch.Tensor.__getitem__ = counted
    try:
        next(feed(data).pieces(0, [slice(0, 96)]))
    finally:
        del torch.Tensor.__getitem__
    assert len(calls) < 10


def test_the_test_set_is_dealt_out_to_ranks_without_loss(data):
    ours = feed(data)
    dealt = [b for r in range(3) for b in ours.test_batches(100, start=r, step=3)]
    assert sum(len(labels) for _, labels in dealt) == len(data.test)
    assert torch.cat([b[1] for b in dealt]).bincount().equal(data.test.labels.bincount())
