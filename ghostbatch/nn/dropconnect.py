"""DropConnect: masks on the weights of a network, one for each update."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ghostbatch.errors import InputError
from ghostbatch.nn.dropout import BatchPosition, keep_mask

LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def connections(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the weights of the linear and convolutional layers, by name, without their biases."""
    weights = {id(layer.weight) for layer in model.modules() if isinstance(layer, LAYERS)}
    return {name: weight for name, weight in model.named_parameters() if id(weight) in weights}


class DropConnect:
    """Drops each connection of a model with probability ``p``; scales the others by 1 / (1 - p).

    Masks depend on the key of an update and on the position of a weight, so they are the same for
    all ranks and micro-batches of an update. With p = 0 nothing is done.
    """

    def __init__(self, model: nn.Module, p: float) -> None:
        if not 0 <= p < 1:
            raise InputError("p", f"{p} is not a probability below 1", "use 0.1, for example")
        self.weights = list(connections(model).values()) if p else []
        self.p = p
        self._update = BatchPosition(self.weights[0].device if self.weights else "cpu")

    def set_key(self, key: int) -> None:
        """Set the key of the coming update's masks."""
        self._update.key.fill_(key)

    @contextmanager
    def masked(self) -> Iterator[None]:
        """Mask the weights inside the context; on exit restore them, and mask their gradients.

        The gradient of L(m w) with respect to w is m times the gradient at m w.
        """
        with torch.no_grad():
            kept = [weight.clone() for weight in self.weights]
            masks = [self._mask(number, weight) for number, weight in enumerate(self.weights)]
            for weight, mask in zip(self.weights, masks, strict=True):
                weight.mul_(mask)
        try:
            yield
        finally:
            with torch.no_grad():
                for weight, before, mask in zip(self.weights, kept, masks, strict=True):
                    weight.copy_(before)
                    if weight.grad is not None:
                        weight.grad.mul_(mask)

    def _mask(self, layer: int, weight: Tensor) -> Tensor:
        kept = keep_mask(self._update, layer, weight.shape[0], tuple(weight.shape[1:]), self.p)
        return kept.to(weight.dtype).div_(1 - self.p)
