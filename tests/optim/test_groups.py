"""Norms and biases without weight decay, against timm's own groups and a step written out."""

import pytest
import torch
from torch import nn

from ghostbatch.nn import MODELS, to_ghost
from ghostbatch.optim import Regime, RegimeScheduler, decay_groups
from ghostbatch.optional import import_torchvision


def ids(groups):
    return [[id(parameter) for parameter in group["params"]] for group in groups]


@pytest.mark.parametrize("name", ["resnet44", "c1", "f1"])
def test_the_groups_are_those_of_timm(name):
    import_torchvision()
    timm_optim = pytest.importorskip("timm.optim")
    model = to_ghost(MODELS[name](10, in_channels=3, image_size=32))
    theirs = timm_optim.param_groups_weight_decay(model, weight_decay=0.1)
    assert sorted(ids(decay_groups(model))) == sorted(ids(theirs))
    assert [group["weight_decay"] for group in theirs] == [0.0, 0.1]


def test_norms_and_biases_of_any_shape_and_all_vectors_are_not_decayed():
    model = nn.ModuleDict({"norm": nn.LayerNorm((4, 5)), "linear": nn.Linear(2, 3)})
    model.bias, model.scale = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(3))
    weights, others = decay_groups(model)
    assert weights == {"params": [model["linear"].weight]}
    assert len(others["params"]) == 5
    assert others["weight_decay"] == 0


def test_a_step_without_gradient_shrinks_the_weights_alone():
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.SGD(decay_groups(model), lr=0.5, weight_decay=0.1)
    regime = Regime(lr=0.5, epochs=2, drops=((1, 0.5, 0.2),), weight_decay=0.1)
    scheduler = RegimeScheduler(optimizer, regime, samples_per_epoch=1, batch=1)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for _ in range(2):  # the second one with the drop's weight decay
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        scheduler.step()
    factors = [(1 - 0.5 * 0.1) * (1 - 0.5 * 0.2), 1, 1, 1]
    for parameter, old, factor in zip(model.parameters(), before, factors, strict=True):
        torch.testing.assert_close(parameter.detach(), factor * old)
