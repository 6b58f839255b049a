"""How the ghosts of a batch move the running statistics, in closed form, on one rank or many.

K updates r <- (1-m) r + m s_k in a row are r <- (1-m)^K r + S with S = sum_k m (1-m)^(K-k) s_k. S
is linear in the s_k, so each rank computes its own, and one small collective brings them together:
rank after rank, as if one had seen all ghosts in order. It happens once per backward, for all
layers together; until then the ranks' shares are pending. On one rank nothing ever is.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import Variable

from ghostbatch.ops import paths
from ghostbatch.ops.buffers import Buffers
from ghostbatch.ops.ranks import Group, gather, inside_backward, ranks_in


class Share(NamedTuple):
    """What one rank's ghosts contribute."""

    ghosts: Tensor | int
    sums: Tensor
    """Of their means and variances, (2, C)."""


class Pending(NamedTuple):
    """A rank's share that waits for those of the other ranks."""

    buffers: Buffers
    share: Share


PENDING: dict[tuple[Group, torch.device], list[Pending]] = {}
_queued_for: int | None = None  # the backward whose end will settle them


def update_running(
    buffers: Buffers, statistics: Tensor, group: Group, *, defer: bool = True
) -> None:
    """Do the exponential updates by ``statistics`` (means and variances, (2, K, C)), oldest first.

    With ``momentum=None`` the running statistics become the average over all ghosts so far; with
    ``running="mean"`` there is one update, with the ghosts' mean. ``defer`` leaves the exchange
    with other ranks to the end of backward.

    A forward that is re-run inside backward, by activation checkpointing, does not count again.
    """
    if inside_backward():
        return
    alone = ranks_in(group) == 1
    if alone and (paths.move_running(buffers, statistics) or _move_at_once(buffers, statistics)):
        return
    share = _share(buffers, statistics)
    if alone:
        _apply(buffers, [share])
    elif defer:
        PENDING.setdefault((group, share.sums.device), []).append(Pending(buffers, share))
    else:
        _exchange([Pending(buffers, share)], group)


def movable_now(buffers: Buffers, group: Group) -> Buffers | None:
    """The buffers, if a forward that can may move them itself."""
    return buffers if ranks_in(group) == 1 and not inside_backward() else None


def settle_after_backward() -> None:
    """Called from a layer's backward: settle what is pending when this backward ends, once."""
    global _queued_for  # noqa: PLW0603
    backward = torch._C._current_graph_task_id()
    if PENDING and backward != _queued_for:
        _queued_for = backward
        Variable._execution_engine.queue_callback(settle)


@torch.no_grad()
def settle(wanted: Callable[[Buffers], bool] = lambda _: True) -> None:
    """Bring the pending shares of all ranks together: one collective per group and device."""
    for (group, device), waiting in list(PENDING.items()):
        now = [pending for pending in waiting if wanted(pending.buffers)]
        PENDING[group, device] = [pending for pending in waiting if not wanted(pending.buffers)]
        if not PENDING[group, device]:
            del PENDING[group, device]
        if now:
            _exchange(now, group)


def _exchange(pending: Sequence[Pending], group: Group) -> None:
    """Send one vector with all shares, receive every rank's, and move the statistics by them."""
    widest = torch.float32
    for _, share in pending:
        widest = torch.promote_types(widest, share.sums.dtype)
    parts = []
    for _, (ghosts, sums) in pending:
        count = torch.as_tensor(ghosts, dtype=widest, device=sums.device)
        parts += [count.view(1), sums.flatten().to(widest)]
    everyone = gather(torch.cat(parts), group).split([part.numel() for part in parts], dim=1)
    for (buffers, share), counts, sums in zip(pending, everyone[::2], everyone[1::2], strict=True):
        by_rank = zip(counts.unbind(), sums.unbind(), strict=True)
        _apply(buffers, [Share(count, row.view_as(share.sums)) for count, row in by_rank])


def _move_at_once(buffers: Buffers, statistics: Tensor) -> bool:
    """Sequential updates in the fewest calls, if nothing is special; say whether that was so.

    On a CPU a small layer would otherwise spend a tenth of its time on these few numbers.
    """
    mean, var, momentum = buffers.mean, buffers.var, buffers.momentum
    if buffers.running != "sequential" or momentum is None or type(statistics) is not Tensor:
        return False
    if statistics.device.type != "cpu" or not mean.dtype == var.dtype == statistics.dtype:
        return False
    if momentum >= 1 or not mean.dim() == var.dim() == 1:
        return False
    means, variances = statistics.transpose(1, 2)
    weights = _cpu_weights(means.shape[1], momentum, statistics.dtype)
    keep = (1 - momentum) ** len(weights)
    mean.addmv_(means, weights, beta=keep)
    var.addmv_(variances, weights, beta=keep)
    if buffers.tracked is not None:
        buffers.tracked.add_(len(weights))
    return True


def _share(buffers: Buffers, statistics: Tensor) -> Share:
    """One rank's share."""
    ghosts = statistics.shape[1]
    if buffers.running == "mean" or buffers.momentum is None:
        return Share(ghosts, statistics.sum(1))
    weights = _weights(ghosts, buffers.momentum, statistics.dtype, statistics.device)
    # No matrix product: autocast would round it.
    return Share(ghosts, (weights[:, None] * statistics).sum(1))


def _weights(ghosts: int, momentum: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Sequential updates weigh a ghost by how many come after it: (K,), oldest first."""
    age = torch.arange(ghosts - 1, -1, -1, dtype=dtype, device=device)
    return torch.pow(1 - momentum, age).mul_(momentum)


@lru_cache(maxsize=64)
def _cpu_weights(ghosts: int, momentum: float, dtype: torch.dtype) -> Tensor:
    """The same few numbers in every update of every layer."""
    with torch.inference_mode(False):
        return _weights(ghosts, momentum, dtype, torch.device("cpu"))


def _apply(buffers: Buffers, shares: Sequence[Share]) -> None:
    """Move the running statistics by the ranks' shares, in the order of the ranks."""
    tracked, momentum, running = buffers.tracked, buffers.momentum, buffers.running
    ghosts = sum(share.ghosts for share in shares)
    if tracked is not None:
        count = ghosts.to(torch.long).squeeze() if isinstance(ghosts, Tensor) else ghosts
        tracked.add_(1 if running == "mean" else count)
    for row, buffer in enumerate((buffers.mean, buffers.var)):
        now = buffer
        if running == "sequential" and momentum is not None:
            for share in shares:
                now = (1 - momentum) ** share.ghosts * now + share.sums[row]
        else:
            total = sum(share.sums[row] for share in shares)
            # One update with the mean over ghosts, or K of an average over all so far.
            step = total / ghosts - buffer if running == "mean" else total - ghosts * buffer
            if momentum is not None:
                now = buffer + momentum * step
            elif tracked is not None:
                now = buffer + step / tracked
        buffer.copy_(now)


@torch.library.custom_op(
    "ghostbatch::update_running",
    mutates_args=("running_mean", "running_var", "num_batches_tracked"),
)
def update_running_op(
    running_mean: Tensor,
    running_var: Tensor,
    num_batches_tracked: Tensor | None,
    statistics: Tensor,
    momentum: float | None,
    running: str,
    group: str | None,
) -> None:
    """As `update_running`, for compiled code, which must ask anew whether it is being re-run.

    The buffers that it is handed may be copies that live only as long as the call, so nothing can
    be left pending: ranks exchange their shares at once, layer by layer.
    """
    buffers = Buffers(running_mean, running_var, num_batches_tracked, momentum, running)
    update_running(buffers, statistics, group, defer=False)


@update_running_op.register_fake
def _(*_: object) -> None:
    """Nothing is returned."""
