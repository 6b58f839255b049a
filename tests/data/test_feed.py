"""Micro-batches put together are the batch, on any number of ranks."""

import pytest
import torch

from ghostbatch.data import TensorFeed, load


@pytest.fixture(scope="module")
def data():
    return load("digits")


def feed(data):
    where = {"device": torch.device("cpu"), "dtype": torch.float64}
    return TensorFeed(data, batch=96, seed=3, augment=True, **where)


def shards(rank, micro, world):
    """The positions of one rank: a contiguous part of every micro-batch."""
    size = micro // world
    return [slice(start, start + size) for start in range(rank * size, 96, micro)]


@pytest.mark.parametrize(("micro", "world"), [(96, 2), (48, 1), (48, 2), (32, 4), (96, 3)])
@pytest.mark.parametrize("update", [0, 41, 7])  # 41 straddles two permutations
def test_the_micro_batches_of_all_ranks_make_up_the_batch(data, micro, world, update):
    (batch,) = feed(data).micro_batches(update, [slice(0, 96)])
    parts = [
        part
        for rank in range(world)
        for part in feed(data).micro_batches(update, shards(rank, micro, world))
    ]
    parts.sort(key=lambda part: part.positions.start)
    assert torch.cat([part.images for part in parts]).equal(batch.images)
    assert torch.cat([part.labels for part in parts]).equal(batch.labels)


def test_a_batch_of_96_takes_fewer_than_ten_indexing_operations(data):
    calls = []
    index = torch.Tensor.__getitem__

    def counted(self, *where):
        calls.append(self.shape)
        return index(self, *where)

    torch.Tensor.__getitem__ = counted
    try:
        next(feed(data).micro_batches(0, [slice(0, 96)]))
    finally:
        del torch.Tensor.__getitem__
    assert len(calls) < 10


@pytest.mark.parametrize("world", [1, 3])
def test_ranks_share_out_the_whole_test_set_in_order(data, world):
    by_rank = [list(feed(data).test_batches(300, rank, world)) for rank in range(world)]
    labels = [by_rank[number % world][number // world][1] for number in range(4)]
    assert [len(each) for each in labels] == [300, 300, 300, 100]
    assert torch.cat(labels).equal(data.test.labels)
