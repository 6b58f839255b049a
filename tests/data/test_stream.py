"""The order of the samples: fresh permutations end to end, split into full batches."""

import random

import torch
from hypothesis import given
from hypothesis import strategies as st

from ghostbatch.data import PermutationStream
from ghostbatch.draws import generator, key


def written(samples, batch, seed, updates):
    """The slow reference: write the whole stream down, then split it."""
    stream = []
    while len(stream) < updates * batch:
        draw = generator(seed, "order", len(stream) // samples)
        stream += torch.randperm(samples, generator=draw).tolist()
    return [stream[u * batch : (u + 1) * batch] for u in range(updates)]


@given(st.integers(1, 60), st.integers(1, 150), st.integers(0, 2**40), st.permutations(range(12)))
def test_batches_are_parts_of_all_permutations_end_to_end_in_whatever_order_they_are_asked_for(
    samples, batch, seed, order
):
    stream, expected = PermutationStream(samples, batch, seed), written(samples, batch, seed, 12)
    for update in (*range(12), *order):
        assert stream.indices(update).tolist() == expected[update]


def test_permutations_differ_from_each_other_and_from_those_of_another_seed():
    streams = [PermutationStream(100, 100, seed) for seed in range(3)]
    orders = {tuple(s.indices(u).tolist()) for s in streams for u in range(3)}
    assert len(orders) == 9
    assert tuple(range(100)) not in orders


def test_no_two_draws_share_a_key():
    draws = [
        (seed, purpose, index)
        for seed in range(12)
        for purpose in ("order", "augment", "noise")
        for index in range(112)
    ]
    keys = {key(*draw) for draw in draws}
    assert len(keys) == len(draws)
    assert all(0 <= number < 2**63 for number in keys)


def test_drawing_leaves_the_global_generators_alone():
    torch.manual_seed(1)
    before = torch.get_rng_state(), random.getstate()
    PermutationStream(100, 30, seed=0).indices(3)
    assert torch.get_rng_state().equal(before[0])
    assert random.getstate() == before[1]
