"""The running statistics of a layer, and how ghosts update them."""

from dataclasses import dataclass

import torch
from torch import Tensor

UNNUMBERED = -1
_numbered = 0


def next_number() -> int:
    """Return the next number for a layer that is built or converted in this process.

    Ranks that run the same script build the same layers in the same order, so a layer has the same
    number on each, and its copies keep it.
    """
    global _numbered  # noqa: PLW0603
    _numbered += 1
    return _numbered - 1


def count_numbered() -> int:
    """Return how many numbers have been given out."""
    return _numbered


@dataclass(eq=False)
class RunningStats:
    """Buffers that are updated in place, and the rule of the update."""

    mean: Tensor
    var: Tensor
    num_batches_tracked: Tensor | None
    momentum: float | None
    """None: the average over all ghosts so far."""
    policy: str
    """"sequential", one update per ghost, or "mean", one with the mean over ghosts."""
    number: int = UNNUMBERED
    """Tells the layer from others when ranks exchange contributions; see `next_number`."""
    updated: bool = False
    """Whether the forward has updated them."""

    def supports_fused_update(self, dtype: torch.dtype) -> bool:
        """Whether a kernel that computes statistics of this dtype can update them."""
        mean, var, tracked = self.mean, self.var, self.num_batches_tracked
        if self.momentum is None or not 0 <= self.momentum <= 1:
            return False
        if tracked is not None and tracked.dtype != torch.long:
            return False
        if not (type(mean) is type(var) is Tensor and mean.dtype == var.dtype == dtype):
            return False
        return mean.is_contiguous() and var.is_contiguous()

    def mark_updated(self) -> None:
        """Record that a kernel has written the buffers; autograd cannot see that by itself."""
        self.updated = True
        for buffer in self.buffers():
            torch.autograd.graph.increment_version(buffer)

    def buffers(self) -> list[Tensor]:
        """Return the buffers that an update writes."""
        counted = [] if self.num_batches_tracked is None else [self.num_batches_tracked]
        return [self.mean, self.var, *counted]
