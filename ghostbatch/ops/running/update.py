"""The update of running statistics by the ghosts of a batch, in closed form.

K updates r <- (1-m) r + m s_k in a row are r <- (1-m)^K r + S with S = sum_k m (1-m)^(K-k) s_k. S
is linear in the s_k, so each rank can compute its own, and the ranks' sums can be applied one after
the other, as if one rank had seen all ghosts in order.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ghostbatch.ops.running.stats import RunningStats


class Contribution(NamedTuple):
    """What one rank's ghosts contribute to an update."""

    ghosts: Tensor | int
    """Their number."""
    sums: Tensor
    """Weighted sums of their means and variances, (2, C)."""


def contribution(running: RunningStats, moments: Tensor) -> Contribution:
    """Sum up the ghosts' means and variances (2, K, C), oldest first, as the policy weighs them."""
    ghosts = moments.shape[1]
    if running.policy == "mean" or running.momentum is None:
        return Contribution(ghosts, moments.sum(1))
    age = torch.arange(ghosts - 1, -1, -1, dtype=moments.dtype, device=moments.device)
    weights = torch.pow(1 - running.momentum, age).mul_(running.momentum)
    # No matrix product: autocast would round it.
    return Contribution(ghosts, (weights[:, None] * moments).sum(1))


def apply_contributions(running: RunningStats, contributions: Sequence[Contribution]) -> None:
    """Update the running statistics by the ranks' contributions, in the order of the ranks.

    With ``momentum=None`` they become the average over all ghosts so far. With the policy "mean"
    there is one update, with the mean over all ghosts. A rank may contribute no ghosts, and if
    none does, nothing changes.
    """
    tracked, momentum, policy = running.num_batches_tracked, running.momentum, running.policy
    ghosts = sum(each.ghosts for each in contributions)
    if tracked is not None:
        count = ghosts.to(torch.long).squeeze() if isinstance(ghosts, Tensor) else ghosts
        tracked.add_(1 * (count > 0) if policy == "mean" else count)
    for row, buffer in enumerate((running.mean, running.var)):
        updated = buffer
        if policy == "sequential" and momentum is not None:
            for each in contributions:
                updated = (1 - momentum) ** each.ghosts * updated + each.sums[row]
        else:
            total = sum(each.sums[row] for each in contributions)
            step = total / ghosts - buffer if policy == "mean" else total - ghosts * buffer
            if momentum is not None:
                updated = buffer + momentum * step
            elif tracked is not None:
                updated = buffer + step / tracked
            if isinstance(ghosts, Tensor):
                updated = torch.where(ghosts > 0, updated, buffer)
            elif not ghosts:
                updated = buffer
        buffer.copy_(updated)
