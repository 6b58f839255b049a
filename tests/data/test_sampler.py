"""A DataLoader with the exact sampler yields the batches of `gb.train`, however they are split."""

from itertools import chain

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import ghostbatch as gb
from ghostbatch.data import ExactBatchSampler, PermutationStream, TensorFeed
from ghostbatch.errors import InputError


def batches(samples, batch, seed, updates):
    """The first batches of the stream."""
    stream = PermutationStream(samples, batch, seed)
    return [stream.indices(update).tolist() for update in range(updates)]


def joined(shards_of_ranks, micro_batches):
    """Put the lists of all ranks together to batches of so many micro-batches."""
    micros = [list(chain(*map(list, shards))) for shards in zip(*shards_of_ranks, strict=True)]
    starts = range(0, len(micros), micro_batches)
    return [list(chain(*micros[start : start + micro_batches])) for start in starts]


def loader(sampler, **options):
    """A loader of the numbers of the samples, as lists."""
    numbers = range(sampler.stream.samples)
    return DataLoader(numbers, batch_sampler=sampler, collate_fn=list, **options)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@given(
    shard=st.integers(1, 5),
    micro_batches=st.integers(1, 3),
    samples=st.integers(1, 70),
    seed=st.integers(0, 2**40),
)
def test_the_lists_of_all_ranks_make_up_the_stream_over_several_passes(
    ranks, shard, micro_batches, samples, seed
):
    micro, batch = ranks * shard, ranks * shard * micro_batches
    sizes = {"micro": micro, "seed": seed, "updates": 3, "ranks": ranks}
    samplers = [ExactBatchSampler(samples, batch, rank=r, **sizes) for r in range(ranks)]
    passes = [joined(samplers, micro_batches) for _ in range(3)]
    assert list(chain(*passes)) == batches(samples, batch, seed, 9)
    for sampler in samplers:
        assert len(sampler) == 3 * micro_batches
        assert {len(indices) for indices in sampler} == {sampler.batch_size} == {shard}


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_loaders_with_workers_yield_the_batches_of_gb_train(tiny, monkeypatch, ranks):
    seen = {}
    draw = TensorFeed.draw

    def noted(self, update):
        drawn = draw(self, update)
        seen[update] = drawn[0].tolist()
        return drawn

    monkeypatch.setattr(TensorFeed, "draw", noted)
    gb.train(tiny)
    expected = [seen[update] for update in range(16)]
    assert len({tuple(batch) for batch in expected}) == 16

    sizes = {"micro": 32, "seed": tiny.seed, "updates": 8, "ranks": ranks}
    samplers = [ExactBatchSampler(4000, 64, rank=rank, **sizes) for rank in range(ranks)]
    loaders = [loader(sampler, num_workers=rank % 3) for rank, sampler in enumerate(samplers)]
    assert [*joined(loaders, 2), *joined(loaders, 2)] == expected


@pytest.mark.parametrize(("samples", "batch", "updates"), [(10, 4, 3), (10, 40, 1), (4000, 512, 8)])
def test_a_pass_is_the_number_of_updates_nearest_to_an_epoch_half_up_and_at_least_one(
    samples, batch, updates
):
    assert len(ExactBatchSampler(samples, batch)) == updates


@pytest.mark.parametrize("done", [0, 4, 5, 6, 17])
def test_a_loop_over_epochs_that_resumes_takes_the_updates_that_are_left(done):
    sizes = {"micro": 2, "updates": 6}
    sampler = ExactBatchSampler(13, 4, **sizes)
    sampler.set_update(done)
    rest = [joined([loader(sampler, num_workers=1)], 2) for _ in range(done // 6, 3)]
    assert list(chain(*rest)) == batches(13, 4, 0, 18)[done:]
    assert [len(each) for each in rest] == [6 - done % 6, *[6] * (2 - done // 6)]


def test_a_pass_that_was_broken_off_begins_again():
    sampler = ExactBatchSampler(13, 4, updates=6)
    first = next(iter(loader(sampler, num_workers=1)))
    assert joined([sampler], 1) == [first, *batches(13, 4, 0, 6)[1:]]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata's own
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("taken", [0, 3, 6, 9])
def test_a_stateful_loader_continues_in_the_middle_of_a_pass(workers, taken):
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader

    def build():
        sampler = ExactBatchSampler(13, 4, micro=2, updates=3)  # passes of 6 lists
        return stateful(range(13), batch_sampler=sampler, collate_fn=list, num_workers=workers)

    whole, before = build(), build()
    expected = [indices for _ in range(3) for indices in whole]
    steps = (indices for _ in range(3) for indices in before)
    begun = [next(steps) for _ in range(taken)]
    after = build()
    after.load_state_dict(before.state_dict())
    ended = max(0, taken - 1) // 6  # after six lists the loop is still in its first pass
    rest = [indices for _ in range(ended, 3) for indices in after]
    assert begun + rest == expected


WRONG = {
    "samples: 0 is below 1": {"samples": 0},
    "updates: 0 is below 1": {"updates": 0},
    "micro: batch 8 does not split into micro-batches of 3; use micro 8, 4, 2 or 1": {"micro": 3},
    "ranks: batch 8 does not split .* over 3 ranks; .* 2 or 1 ranks": {"rank": 0, "ranks": 3},
    "rank: 2 is not one of 2 ranks; use 0 to 1": {"rank": 2, "ranks": 2},
    "rank: is missing for 2 ranks": {"ranks": 2},
}


@pytest.mark.parametrize(("line", "given"), WRONG.items(), ids=WRONG)
def test_wrong_sizes_are_refused(line, given):
    with pytest.raises(InputError, match=f"^{line}"):
        ExactBatchSampler(**{"samples": 20, "batch": 8, **given})


def test_an_update_below_zero_is_refused():
    with pytest.raises(InputError, match=r"^update: -1 is below 0"):
        ExactBatchSampler(20, 8).set_update(-1)


def test_processes_without_a_process_group_are_refused_unless_the_ranks_are_given(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InputError, match=r"^ranks: 2 processes were started"):
        ExactBatchSampler(20, 8)
    assert ExactBatchSampler(20, 8, ranks=1).batch_size == 8


@pytest.mark.parametrize("rank", [-1, 1])
def test_a_rank_that_the_process_group_lacks_is_refused(rank):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(InputError, match=rf"^rank: {rank} is not one of 1 ranks; use 0 to 0"):
            ExactBatchSampler(20, 8, rank=rank)
        assert ExactBatchSampler(20, 8).batch_size == 8
    finally:
        dist.destroy_process_group()
