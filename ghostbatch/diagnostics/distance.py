"""How far the weights have walked from where they started."""

from dataclasses import dataclass
from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Distance:
    """Euclidean distance from the initial weights; as a float it is the total."""

    total: float
    layers: dict[str, float]
    """By parameter name; the total is the root of the sum of their squares."""

    def __float__(self) -> float:
        return self.total


class WeightDistance:
    """Remembers a model's trainable parameters and measures how far they have moved since.

    >>> layer = nn.Linear(2, 1)
    >>> walked = WeightDistance(layer)
    >>> with torch.no_grad():
    ...     _ = layer.bias.add_(3.0)
    >>> round(walked.distance().total, 4), round(walked.distance().layers["bias"], 4)
    (3.0, 3.0)
    """

    def __init__(self, model: nn.Module) -> None:
        self._parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self._start = {n: p.detach().clone() for n, p in self._parameters.items()}

    @torch.no_grad()
    def distance(self) -> Distance:
        """The distance now, per parameter tensor and in all."""
        if not self._parameters:
            return Distance(0.0, {})
        moved = torch._foreach_sub(list(self._parameters.values()), list(self._start.values()))
        wide = [m.to(torch.promote_types(m.dtype, torch.float32)) for m in moved]
        device = wide[0].device
        each = [norm.to(device, torch.float64) for norm in torch._foreach_norm(wide)]
        norms = torch.stack(each).tolist()
        layers = dict(zip(self._parameters, norms, strict=True))
        return Distance(sqrt(sum(norm**2 for norm in norms)), layers)

    def state_dict(self) -> dict[str, Any]:
        """The initial weights, for a checkpoint."""
        return {"start": self._start}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Measure from the initial weights of an earlier session."""
        start: dict[str, Tensor] = state_dict["start"]
        if {n: t.shape for n, t in start.items()} != {n: t.shape for n, t in self._start.items()}:
            raise ValueError("the saved weights are those of another model")
        for name, tensor in self._start.items():
            tensor.copy_(start[name])


def log_spaced(last: int, per_decade: int = 20) -> list[int]:
    """Updates from 1 to ``last``, evenly spaced in log time as far as whole numbers allow.

    >>> log_spaced(10, per_decade=4)
    [1, 2, 3, 6, 10]
    """
    steps = range(10 * per_decade)
    spaced = {round(10 ** (step / per_decade)) for step in steps}
    return sorted({update for update in spaced if update < last} | {last})
