"""Parameter groups for an optimizer: norms and biases may have options of their own."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

Parameters = Iterable[nn.Parameter] | Iterable[dict[str, Any]]
"""What an optimizer takes: parameters, or groups of them."""


def decay_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Return `norm_groups` in which norms and biases have no weight decay.

    `RegimeScheduler` leaves them without weight decay.

    >>> model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    >>> optimizer = torch.optim.SGD(decay_groups(model), lr=0.1, weight_decay=1e-4)
    >>> [(len(group["params"]), group["weight_decay"]) for group in optimizer.param_groups]
    [(1, 0.0001), (3, 0.0)]
    """
    return norm_groups(model, weight_decay=0.0)


def norm_groups(model: nn.Module, **options: Any) -> list[dict[str, Any]]:
    """Return two groups for an optimizer: the weights, and norms and biases with ``options``.

    The second group holds the parameters of norm layers, those called bias, and all others with
    fewer than two dimensions, such as the scale of a layer.

    >>> layer = nn.Linear(2, 2)
    >>> _, others = norm_groups(layer, adapt=False)
    >>> others["params"][0] is layer.bias, others["adapt"]
    (True, False)
    """
    in_norms = norm_parameters(model)
    weights: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        is_other = parameter.ndim < 2 or is_bias(name) or id(parameter) in in_norms
        (others if is_other else weights).append(parameter)
    return [{"params": weights}, {"params": others, **options}]


def norm_parameters(model: nn.Module) -> set[int]:
    """Return the ids of the parameters of norm layers: "Norm" is in their class's name or a base's.

    >>> len(norm_parameters(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))))
    2
    """
    return {
        id(parameter)
        for layer in model.modules()
        if any("Norm" in kind.__name__ for kind in type(layer).__mro__)
        for parameter in layer.parameters(recurse=False)
    }


def set_option(group: dict[str, Any], name: str, value: Any) -> None:
    """Set an option of a parameter group; a tensor keeps its place, which CUDA graphs read."""
    if isinstance(group[name], Tensor):
        group[name].fill_(value)
    else:
        group[name] = value


def wide_dtype(tensor: Tensor) -> torch.dtype:
    """Return the dtype for sums and norms of a tensor: at least fp32."""
    return torch.promote_types(tensor.dtype, torch.float32)


def is_bias(name: str) -> bool:
    """Return whether the parameter of this name is a bias."""
    return name.rpartition(".")[2] == "bias"
