"""The operator that updates running statistics in compiled code."""

import torch
from torch import Tensor

from ghostbatch.ops.backends import select
from ghostbatch.ops.running.exchange import update_running, updates_in_forward
from ghostbatch.ops.running.stats import RunningStats


@torch.library.custom_op(
    "ghostbatch::update_running",
    mutates_args=("running_mean", "running_var", "num_batches_tracked"),
)
def update_running_op(
    running_mean: Tensor,
    running_var: Tensor,
    num_batches_tracked: Tensor | None,
    moments: Tensor,
    momentum: float | None,
    running: str,
    group: str | None,
) -> None:
    """As `update_running`, which looks at run time whether this is a re-run inside backward.

    The buffers may be copies that live only as long as the call, so nothing can be left pending:
    ranks exchange their contributions at once, layer by layer.
    """
    stats = RunningStats(running_mean, running_var, num_batches_tracked, momentum, running)
    if not (updates_in_forward(group) and select.update_running(stats, moments)):
        update_running(stats, moments, group, defer=False)


@update_running_op.register_fake
def _(*_: object) -> None:
    """Return nothing."""
