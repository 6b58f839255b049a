"""Batch norm over all ranks is PyTorch's BatchNorm on the batch of all of them."""

from pathlib import Path

import pytest
import torch
from launch_ranks import case_names, ranks_fixture
from torch import nn

from ghostbatch.nn import GhostBatchNorm2d, to_cross_rank

SCRIPT = Path(__file__).with_name("cross_rank_cases.py")
on_ranks = ranks_fixture(SCRIPT, 2)


@pytest.mark.parametrize("name", case_names(SCRIPT))
def test_two_ranks_are_batch_norm_on_the_batch_of_both(on_ranks, name):
    on_ranks(name)


def test_conversion_keeps_objects_and_leaves_other_norms_alone():
    class Own(nn.BatchNorm2d):
        """A user's subclass."""

    model = nn.Sequential(nn.BatchNorm2d(3), GhostBatchNorm2d(3, 4), nn.LayerNorm(3), Own(3))
    before = {name: id(tensor) for name, tensor in model.state_dict(keep_vars=True).items()}
    kinds = [type(layer) for layer in model]
    to_cross_rank(model)
    assert {n: id(t) for n, t in model.state_dict(keep_vars=True).items()} == before
    assert [type(layer) for layer in model][1:] == kinds[1:]
    assert type(model[0]) is not kinds[0]


def test_evaluation_sends_nothing():
    """Sending would fail here: there is no process group."""
    model = nn.Sequential(nn.BatchNorm2d(3))
    x = torch.randn(2, 3, 4, 4)
    expected = model.eval()(x)
    to_cross_rank(model)
    assert model(x).equal(expected)
