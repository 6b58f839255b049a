"""How the ghosts of a batch move the running statistics, in closed form."""

import torch
from torch import Tensor


def update_running(
    running_mean: Tensor,
    running_var: Tensor,
    num_batches_tracked: Tensor | None,
    means: Tensor,
    variances: Tensor,
    momentum: float | None,
    running: str,
) -> None:
    """Do the exponential updates of ``means`` and ``variances`` (K, C), oldest first, at once.

    r <- (1-m)^K r + sum_k m (1-m)^(K-k) s_k; with ``momentum=None`` the average over all ghosts so
    far; with ``running="mean"`` one update with the ghosts' mean.

    A forward that is re-run inside backward, by activation checkpointing, does not count again.
    """
    if torch._C._current_graph_task_id() != -1:
        return
    ghosts = means.shape[0]
    if running == "mean":
        means, variances = means.mean(0, keepdim=True), variances.mean(0, keepdim=True)
        ghosts = 1
    if num_batches_tracked is not None:
        num_batches_tracked += ghosts
    if momentum is not None:
        keep = (1 - momentum) ** ghosts
        age = torch.arange(ghosts - 1, -1, -1, dtype=means.dtype, device=means.device)  # K - k
        share = momentum * torch.pow(1 - momentum, age)
        for buffer, values in ((running_mean, means), (running_var, variances)):
            buffer.copy_(keep * buffer + share @ values)
    elif num_batches_tracked is not None:
        for buffer, values in ((running_mean, means), (running_var, variances)):
            # The average over n ghosts moves towards that over the n + K now known.
            buffer.add_((values - buffer).sum(0) / num_batches_tracked)


update_running_op = torch.library.custom_op(
    "ghostbatch::update_running",
    update_running,
    mutates_args=("running_mean", "running_var", "num_batches_tracked"),
)
"""The same for compiled code, which must ask each time it runs whether it is being re-run."""


@update_running_op.register_fake
def _(*_: object) -> None:
    """Nothing is returned."""
