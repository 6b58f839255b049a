"""The paper's networks: their sizes, their layers, and what happens to a wrong name."""

import pytest
import torch
from torch import nn

from ghostbatch.errors import InputError
from ghostbatch.nn import MODELS, find_model


def test_f1_has_the_papers_number_of_parameters():
    assert sum(p.numel() for p in MODELS["f1"]().parameters()) == 1_462_794


def test_f1_is_five_times_linear_norm_relu_and_a_linear():
    kinds = [type(layer) for layer in MODELS["f1"]()]
    assert kinds == [nn.Flatten, *[nn.Linear, nn.BatchNorm1d, nn.ReLU] * 5, nn.Linear]


def test_f1_takes_any_image_and_number_of_classes():
    model = MODELS["f1"](num_classes=7, in_channels=3, image_size=5)
    assert model(torch.zeros(4, 3, 5, 5)).shape == (4, 7)


def test_an_unknown_network_is_refused_with_those_that_are_known():
    with pytest.raises(InputError, match=r"^model: 'f2' is unknown; .*f1") as raised:
        find_model("f2")
    assert raised.value.field == "model"
