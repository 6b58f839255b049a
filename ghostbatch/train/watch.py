"""Notices a run that diverges, and finds out where."""

from collections.abc import Iterable
from math import isfinite
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

FAR = 10.0
"""Times the first update's loss: from here on a loss is far above the start."""

PATIENCE = 100
"""Updates in a row with such a loss after which a run is given up."""


class Watch:
    """Looks at the loss and the gradient's norm of every update before the weights take it."""

    def __init__(self) -> None:
        self.start: float | None = None
        """Loss of the first update."""
        self.above = 0
        """Updates in a row that were far above it."""

    def problem(self, loss: float, norm: float) -> str | None:
        """What is wrong with an update, if it is."""
        if not isfinite(loss):
            return f"the loss is {loss}"
        if not isfinite(norm):
            return f"the gradient's norm is {norm}"
        if self.start is None:
            self.start = loss
        self.above = self.above + 1 if loss > FAR * self.start else 0
        if self.above >= PATIENCE:
            return f"the loss is {loss:.3g} and has been above {FAR:g} x its first for {PATIENCE}"
        return None

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"start": self.start, "above": self.above}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on watching."""
        self.start, self.above = state["start"], state["above"]


class Found(NamedTuple):
    """A value that is not finite; the smallest is the first on the way through and back."""

    backward: bool
    number: int
    what: str


def find_nonfinite(
    model: nn.Module, inputs: Iterable[Tensor], autocast: torch.autocast
) -> Found | None:
    """The first value that is not finite on the way through ``model`` and back, by its layer.

    Gradients are those of the update that went wrong; the forwards are run once more. Running
    statistics move by them.
    """
    found: list[Found] = []
    calls = 0

    def look(name: str) -> Any:
        def hook(layer: nn.Module, _inputs: Any, output: Any) -> None:
            nonlocal calls
            calls += 1
            for part, tensor in layer.named_parameters(recurse=False):
                if not bool(tensor.isfinite().all()):
                    found.append(Found(False, calls, f"{part} of layer {name}"))
            if isinstance(output, Tensor) and not bool(output.isfinite().all()):
                what = f"layer {name} ({type(layer).__name__})" if name else "network"
                found.append(Found(False, calls, f"output of {what}"))

        return hook

    hooks = [layer.register_forward_hook(look(name)) for name, layer in model.named_modules()]
    try:
        with torch.no_grad(), autocast:
            for images in inputs:
                calls = 0
                model(images)
    finally:
        for hook in hooks:
            hook.remove()
    for number, (name, parameter) in enumerate(reversed(list(model.named_parameters()))):
        if parameter.grad is not None and not bool(parameter.grad.isfinite().all()):
            found.append(Found(True, number, f"gradient of {name}"))
    return min(found, key=lambda it: it[:2], default=None)
