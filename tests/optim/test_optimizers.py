"""Optimizer specs: they build PyTorch's optimizers, and a step can be skipped."""

from dataclasses import FrozenInstanceError

import pytest
import torch
from torch import nn

from ghostbatch import Regime
from ghostbatch.errors import InputError
from ghostbatch.optim import SGD, spec_from_dict, spec_to_dict

REGIME = Regime(lr=0.5, epochs=2, drops=((1, 0.25),), momentum=0.8, weight_decay=0.01)


@pytest.mark.parametrize("nesterov", [False, True])
def test_sgd_takes_its_numbers_from_the_regime(nesterov):
    built = SGD(nesterov=nesterov).build(nn.Linear(2, 2).parameters(), REGIME)
    assert type(built) is torch.optim.SGD
    expected = {"lr": 0.5, "momentum": 0.8, "weight_decay": 0.01, "nesterov": nesterov}
    assert built.defaults.items() >= expected.items()


def test_a_spec_survives_plain_data_and_carries_its_tag():
    written = spec_to_dict(SGD(nesterov=True))
    assert written == {"kind": "sgd", "nesterov": True}
    assert spec_from_dict(written) == SGD(nesterov=True)


def test_an_unknown_kind_is_refused_by_name():
    with pytest.raises(InputError, match=r"^optimizer: 'lion' is unknown; choose one of sgd"):
        spec_from_dict({"kind": "lion"})


def test_a_spec_is_frozen():
    with pytest.raises(FrozenInstanceError):
        SGD().nesterov = True
