"""How batches are split: in order, nothing twice, ghosts never parted; refusals name what works."""

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ghostbatch import train
from ghostbatch.data import BatchSplit
from ghostbatch.errors import InputError
from ghostbatch.nn import find_model, to_ghost
from ghostbatch.train.split import split_batch


@st.composite
def fitting(draw):
    """A split that is accepted by construction."""
    unit, world = draw(st.integers(1, 8)), draw(st.integers(1, 8))
    micro = world * unit * draw(st.integers(1, 4))
    return BatchSplit(
        batch=micro * draw(st.integers(1, 4)), micro=micro, world=world, multiple_of=unit
    )


@st.composite
def any_split(draw):
    batch = draw(st.integers(2, 400))
    full = draw(st.booleans())
    return BatchSplit(
        batch=batch,
        micro=draw(st.just(batch) | st.integers(0, 500)),
        world=draw(st.integers(1, 9)),
        multiple_of=1 if full else draw(st.integers(1, 40)),
        needs_full_batch=full,
    )


@given(fitting())
def test_all_pieces_together_are_the_batch_in_order(split):
    split.check()
    by_rank = [split.positions(rank) for rank in range(split.world)]
    seen = [
        n for passes in zip(*by_rank, strict=True) for p in passes for n in range(split.batch)[p]
    ]
    assert seen == list(range(split.batch))


@given(fitting())
def test_pieces_are_whole_ghosts_of_equal_number(split):
    for rank in range(split.world):
        for piece in split.positions(rank):
            assert piece.start % split.multiple_of == 0
            assert piece.stop - piece.start == split.shard
            assert split.shard % split.multiple_of == 0


def accepted(split):
    try:
        split.check()
    except InputError:
        return False
    return True


@given(any_split())
def test_what_is_accepted_can_be_cut(split):
    if accepted(split):
        parted = split.micro != split.batch or split.world > 1
        assert split.batch % split.micro == 0
        assert split.micro % split.world == 0
        assert not parted or split.shard % split.multiple_of == 0
        assert not split.needs_full_batch or split.micro == split.batch


@given(any_split())
def test_every_size_that_a_refusal_names_is_accepted(split):
    if not accepted(split):
        with pytest.raises(InputError) as caught:
            split.check()
        named = advised(split, caught.value.remedy)
        assert named, caught.value
        for other in named:
            assert accepted(other), f"{caught.value} names {other}"


def advised(split, remedy):
    """Read a refusal as its reader would: change what it names, leave the rest."""
    if "leave micro out" in remedy:
        split = replace(split, micro=split.batch)
    if "set a ghost size" in remedy:  # that is about the norm alone; ranks are another matter
        split = replace(split, world=1)
    found = [split] if "leave micro out, or" in remedy else []
    if match := re.search(r"use micro ([\d, or]+)", remedy):
        found += [replace(split, micro=int(n)) for n in re.findall(r"\d+", match[1])]
    if match := re.search(r"use ([\d, or]+) ranks?", remedy):
        found += [replace(split, world=int(n)) for n in re.findall(r"\d+", match[1])]
    if match := re.search(r"a batch that (\d+) divides, such as (\d+)", remedy):
        assert int(match[2]) % int(match[1]) == 0
        found.append(replace(split, batch=int(match[2]), micro=int(match[2])))
    return found


@given(any_split() | fitting())
def test_the_next_micro_batch_to_try_is_at_most_half_and_accepted(split):
    if accepted(split) and (smaller := split.smaller()) is not None:
        assert smaller <= split.micro / 2
        assert accepted(replace(split, micro=smaller))


@given(fitting())
def test_halving_ends_at_one_ghost_per_rank(split):
    while (smaller := split.smaller()) is not None:
        split = replace(split, micro=smaller)
    assert split.shard == split.multiple_of


def refusal(split):
    with pytest.raises(InputError) as caught:
        split.check()
    return str(caught.value)


def test_refusals_read_as_sentences():
    split = BatchSplit(batch=128, micro=48, world=2, multiple_of=16)
    assert refusal(split) == (
        "micro: batch 128 does not split into micro-batches of 48 over 2 ranks without "
        "splitting ghosts of 16; use micro 128, 64 or 32"
    )
    assert refusal(replace(split, micro=128, world=3)) == (
        "ranks: batch 128 does not split into micro-batches of 128 over 3 ranks without "
        "splitting ghosts of 16; use 2 or 1 ranks, or a batch that 48 divides, such as 144"
    )
    assert refusal(BatchSplit(batch=100, micro=50, world=1, multiple_of=32)) == (
        "micro: batch 100 does not split into micro-batches of 50 without splitting ghosts of "
        "32; leave micro out, or use a batch that 32 divides, such as 96"
    )
    assert refusal(replace(split, micro=0)) == "micro: 0 is below 1; use micro 128, 64 or 32"


def model(recipe):
    network = find_model(recipe.model)()
    return to_ghost(network, recipe.ghost) if recipe.ghost else network


def test_micro_batches_are_refused_with_plain_batch_norm(tiny):
    plain = replace(tiny, ghost=None)
    assert split_batch(plain, model(plain), None, world=4).shard == 16
    with pytest.raises(InputError, match=r"^micro: plain batch norm .*; leave micro out, or set a"):
        split_batch(plain, model(plain), 32, world=1)


def test_micro_batches_are_refused_with_the_mean_over_ghosts(tiny):
    mean = replace(tiny, running="mean")
    assert split_batch(mean, model(mean), 64, world=2).micro == 64
    with pytest.raises(InputError, match=r'^micro: running "mean" .*; leave micro out, or use run'):
        split_batch(mean, model(mean), 32, world=1)


@pytest.mark.parametrize("micro", [None, 32])
def test_micro_batches_are_refused_where_a_norm_runs_several_times(tiny, micro, tmp_path):
    """Its ghosts would come in another order: those of one use after those of another."""
    recipe = replace(tiny, model="python:small_networks:repeated")
    if micro is None:
        assert train(recipe, micro=micro).status == "finished"
        return
    line = r"^micro: 2\.block\.1 of python:.* normalises 3 times in a forward; leave micro out"
    with pytest.raises(InputError, match=line):
        train(recipe, micro=micro, out=tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


def test_a_network_without_batch_norm_may_be_cut_anywhere(tiny):
    split = split_batch(replace(tiny, ghost=None), nn.Linear(2, 2), 1, world=1)
    assert (split.multiple_of, split.needs_full_batch, len(split.positions(0))) == (1, False, 64)


class OtherNorm(nn.BatchNorm2d):
    """Someone's batch norm that does something more."""


@pytest.mark.parametrize(("micro", "world"), [(32, 1), (None, 2)])
def test_batch_norms_of_another_kind_must_not_see_pieces(tiny, micro, world):
    model = nn.Sequential(nn.Conv2d(1, 2, 3), OtherNorm(2))
    with pytest.raises(
        InputError, match=r"^model: 1 \(OtherNorm\) is an unknown kind of batch norm"
    ):
        split_batch(tiny, model, micro, world)
    split_batch(tiny, model, None, 1)
