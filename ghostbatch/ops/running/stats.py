"""The running statistics of a layer, and how ghosts update them."""

from dataclasses import dataclass

import torch
from torch import Tensor


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
    updated: bool = False
    """Whether the forward has updated them."""

    def supports_fused_update(self, dtype: torch.dtype) -> bool:
        """Whether a kernel that computes statistics of this dtype can update them."""
        if self.momentum is None or not 0 <= self.momentum <= 1:
            return False
        tracked = self.num_batches_tracked
        if tracked is not None and tracked.dtype != torch.long:
            return False
        return all(
            type(t) is Tensor and t.dtype == dtype and t.is_contiguous()
            for t in (self.mean, self.var)
        )

    def mark_updated(self) -> None:
        """Record that a kernel has written the buffers; autograd cannot see that by itself."""
        self.updated = True
        for buffer in (self.mean, self.var, self.num_batches_tracked):
            if buffer is not None:
                torch.autograd.graph.increment_version(buffer)
