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

    @property
    def suit_kernels(self) -> bool:
        """Whether a kernel can move them."""
        if self.momentum is None or not 0 <= self.momentum <= 1:
            return False
        return all(t.dtype == torch.float32 and t.is_contiguous() for t in (self.mean, self.var))
