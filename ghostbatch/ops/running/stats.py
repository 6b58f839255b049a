"""The running statistics of a layer, and how they are to move."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(slots=True, eq=False)
class Buffers:
    """What moves, and how."""

    mean: Tensor
    var: Tensor
    tracked: Tensor | None
    momentum: float | None
    """None: the average over all ghosts so far."""
    running: str
    """"sequential", or "mean": one update with the mean over ghosts."""
    moved: bool = False
    """Whether the forward has seen to it."""

    def suit(self, dtype: torch.dtype) -> bool:
        """Whether a kernel that computes statistics of this dtype can move them."""
        if self.momentum is None or not 0 <= self.momentum <= 1:
            return False
        if self.tracked is not None and self.tracked.dtype != torch.long:
            return False
        return all(t.dtype == dtype and t.is_contiguous() for t in (self.mean, self.var))

    def have_moved(self) -> None:
        """Tell autograd and the caller what a kernel has done."""
        self.moved = True
        for buffer in (self.mean, self.var, self.tracked):
            if buffer is not None:
                torch.autograd.graph.increment_version(buffer)
