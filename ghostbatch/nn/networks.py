"""The paper's networks, with plain BatchNorm; conversion brings the ghosts."""

from collections.abc import Callable
from itertools import pairwise

from torch import nn

from ghostbatch.errors import InputError

Builder = Callable[..., nn.Module]


def f1(num_classes: int = 10, *, in_channels: int = 1, image_size: int = 28) -> nn.Module:
    """F1: five hidden layers of 512, each Linear, BatchNorm, ReLU (1,462,794 parameters)."""
    width, depth = 512, 5
    sizes = [in_channels * image_size**2] + [width] * depth
    layers: list[nn.Module] = [nn.Flatten()]
    for fan_in, fan_out in pairwise(sizes):
        layers += [nn.Linear(fan_in, fan_out), nn.BatchNorm1d(fan_out), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, num_classes))


MODELS: dict[str, Builder] = {"f1": f1}


def find_model(name: str) -> Builder:
    """Look up the builder of a network by name.

    >>> find_model("f1") is f1
    True
    """
    if name not in MODELS:
        raise InputError("model", f"{name!r} is unknown", f"choose one of {', '.join(MODELS)}")
    return MODELS[name]
