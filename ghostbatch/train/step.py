"""The gradient of one update, and the running means of what is reported of updates."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ghostbatch.data import MicroBatch
from ghostbatch.train.ranks import accumulating


@dataclass
class Tally:
    """Sums over updates of loss, accuracy, gradient norm, and clipped or not."""

    sums: list[float] = field(default_factory=lambda: [0.0] * 4)
    updates: int = 0

    def add(self, loss: float, accuracy: float, norm: float, clipped: bool) -> None:
        """Count one update."""
        found = (loss, accuracy, norm, float(clipped))
        self.sums = [total + value for total, value in zip(self.sums, found, strict=True)]
        self.updates += 1

    def means(self) -> dict[str, float]:
        """The means since the last call, which starts the next."""
        names = ("loss", "accuracy", "gradient_norm", "clipped")
        means = {n: total / self.updates for n, total in zip(names, self.sums, strict=True)}
        self.sums, self.updates = [0.0] * 4, 0
        return means

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"sums": self.sums, "updates": self.updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on counting."""
        self.sums, self.updates = list(state["sums"]), state["updates"]


def take_gradients(
    parallel: nn.Module,
    pieces: Iterable[tuple[MicroBatch, bool]],
    factor: float,
    weights: Tensor | None,
    autocast: torch.autocast,
    at: Callable[[MicroBatch], None],
) -> Tensor:
    """Add up the gradients of this rank's pieces; return its sums of loss and right answers.

    Args:
        parallel: the model; after the last piece its gradients are means over the ranks.
        pieces: each with whether another one follows.
        factor: of the summed loss, so that the gradients come out as means over the batch.
        weights: of every sample of the batch; the sums that are returned are not weighted.
        autocast: the arithmetic.
        at: called before each piece.

    """
    sums = torch.zeros((), dtype=torch.float64)
    for piece, more in pieces:
        at(piece)
        with accumulating(parallel, more):
            with autocast:
                outputs = parallel(piece.images)
                losses = F.cross_entropy(outputs, piece.labels, reduction="none")
            weighed = losses if weights is None else losses * weights[piece.positions].to(losses)
            (weighed.sum() * factor).backward()
        correct = outputs.detach().argmax(1) == piece.labels
        sums = sums.to(losses.device) + torch.stack([losses.detach().double(), correct]).sum(1)
    return sums
