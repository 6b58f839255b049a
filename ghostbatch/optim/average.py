"""An exponential average of the weights whose window, in images, does not depend on the batch."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ghostbatch.errors import InputError, check_positive
from ghostbatch.optim.groups import wide_dtype


class WeightAverage:
    """An exponential moving average of a model's trainable parameters.

    Call ``update`` after each step of the optimizer, and evaluate inside ``applied``. Buffers are
    not averaged: call `recalibrate` for the running statistics that fit the averaged weights.

    The average is over the weights after each update, without the initial weights: it begins at 0
    and is divided by the sum of its factors. ``update`` does not wait for the device and can be
    part of a CUDA graph.

    Args:
        model: its parameters are looked up once, now.
        decay: factor of the average so far at an update of ``base_batch`` samples. For ``batch``
            samples it is decay ** (batch / base_batch), so the window in samples is the same.
        batch: samples per update, over all ranks.
        base_batch: the batch that ``decay`` is meant for.

    >>> layer = nn.Linear(1, 1, bias=False)
    >>> average = WeightAverage(layer, decay=0.5)
    >>> for weight in (3.0, 6.0):
    ...     _ = nn.init.constant_(layer.weight, weight)
    ...     average.update()
    >>> with average.applied():  # (3 * 0.5 + 6) / (0.5 + 1)
    ...     print(layer.weight.item())
    5.0
    >>> layer.weight.item(), WeightAverage(layer, 0.5, batch=64, base_batch=32).decay
    (6.0, 0.25)

    """

    def __init__(
        self, model: nn.Module, decay: float, *, batch: int = 1, base_batch: int = 1
    ) -> None:
        check_decay("decay", decay)
        check_positive(batch=batch, base_batch=base_batch)
        self.decay = decay ** (batch / base_batch)
        """Factor of the average so far, at each update."""
        self._parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
        if not self._parameters:
            raise InputError("model", "it has no trainable parameters", "give one that has")
        # In bf16 the small steps of an average would be rounded away.
        self._sums = {
            n: torch.zeros_like(p, dtype=wide_dtype(p)) for n, p in self._parameters.items()
        }
        first = next(iter(self._parameters.values()))
        # The same average of the number 1: the factors of all updates so far, added up.
        self._one = torch.ones((), dtype=wide_dtype(first), device=first.device)
        self._total = torch.zeros_like(self._one)

    @torch.no_grad()
    def update(self) -> None:
        """Add the current weights."""
        weights = [weight.to(wide_dtype(weight)) for weight in self._parameters.values()]
        torch._foreach_lerp_([*self._sums.values()], weights, 1 - self.decay)
        self._total.lerp_(self._one, 1 - self.decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Give the model the averaged weights; put back its own, bit by bit, at the end."""
        if not (total := float(self._total)):
            raise InputError("average", "it is empty", "call update after a step of the optimizer")
        own = {name: weight.detach().clone() for name, weight in self._parameters.items()}
        try:
            self._set({name: weighted / total for name, weighted in self._sums.items()})
            yield
        finally:
            self._set(own)

    @torch.no_grad()
    def _set(self, weights: dict[str, Tensor]) -> None:
        for name, weight in self._parameters.items():
            weight.copy_(weights[name])

    def state_dict(self) -> dict[str, Any]:
        """Return the sums of the weights for a checkpoint."""
        return {"sums": self._sums, "total": self._total}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue with the sums in a checkpoint."""
        saved: dict[str, Tensor] = state_dict.get("sums", {})
        if {n: t.shape for n, t in saved.items()} != {n: t.shape for n, t in self._sums.items()}:
            problem = "its average is that of another model"
            raise InputError("state_dict", problem, "load that of this model")
        for name, weighted in self._sums.items():
            weighted.copy_(saved[name])
        self._total.copy_(state_dict["total"])


def check_decay(field: str, decay: float) -> None:
    """Refuse a decay that is not between 0 and 1."""
    if not (isinstance(decay, float) and 0 < decay < 1):
        raise InputError(field, f"{decay!r} is not between 0 and 1", "use 0.999, for example")
