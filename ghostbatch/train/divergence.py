"""Finds the layer in which a diverged update first produced a value that is not finite."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class NonFinite(NamedTuple):
    """A value that is not finite; the smallest of them is the first in execution order."""

    backward: bool
    number: int
    """Position in the forward pass, or in the backward pass."""
    what: str


def find_nonfinite(
    model: nn.Module, inputs: Iterable[Tensor], autocast: torch.autocast
) -> NonFinite | None:
    """Return the first value that is not finite in a forward and backward pass of ``model``.

    The gradients must be those of the diverged update; the forward passes are run once more and
    change the running statistics.
    """
    found: list[NonFinite] = []
    calls = 0

    def check(name: str) -> Any:
        def hook(layer: nn.Module, _inputs: Any, output: Any) -> None:
            nonlocal calls
            calls += 1
            for part, tensor in layer.named_parameters(recurse=False):
                if not bool(tensor.isfinite().all()):
                    found.append(NonFinite(False, calls, f"{part} of layer {name}"))
            outputs = output if isinstance(output, tuple) else (output,)
            if not all(bool(o.isfinite().all()) for o in outputs if isinstance(o, Tensor)):
                what = f"layer {name} ({type(layer).__name__})" if name else "network"
                found.append(NonFinite(False, calls, f"output of {what}"))

        return hook

    hooks = [layer.register_forward_hook(check(name)) for name, layer in model.named_modules()]
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
            found.append(NonFinite(True, number, f"gradient of {name}"))
    return min(found, key=lambda value: value[:2], default=None)
