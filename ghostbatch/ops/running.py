"""How the ghosts of a batch move the running statistics, in closed form, on one rank or many.

K updates r <- (1-m) r + m s_k in a row are r <- (1-m)^K r + S with S = sum_k m (1-m)^(K-k) s_k. S
is linear in the s_k, so each rank computes its own, and one small collective brings them together:
rank after rank, as if one had seen all ghosts in order. It happens once per backward, for all
layers together; until then the ranks' shares are pending. On one rank nothing ever is.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import Variable

from ghostbatch.ops.ranks import Group, gather, inside_backward, ranks_in


class Buffers(NamedTuple):
    """What moves, and how."""

    mean: Tensor
    var: Tensor
    tracked: Tensor | None
    momentum: float | None
    """None: the average over all ghosts so far."""
    running: str
    """"sequential", or "mean": one update with the mean over ghosts."""


class Pending(NamedTuple):
    """A rank's share that waits for those of the other ranks."""

    buffers: Buffers
    share: Tensor


PENDING: dict[tuple[Group, torch.device], list[Pending]] = {}
_queued_for: int | None = None  # the backward whose end will settle them


def update_running(
    running_mean: Tensor,
    running_var: Tensor,
    num_batches_tracked: Tensor | None,
    statistics: Tensor,
    momentum: float | None,
    running: str,
    group: Group,
) -> None:
    """Do the exponential updates by ``statistics`` (means and variances, (2, K, C)), oldest first.

    With ``momentum=None`` the running statistics become the average over all ghosts so far; with
    ``running="mean"`` there is one update, with the ghosts' mean.

    A forward that is re-run inside backward, by activation checkpointing, does not count again.
    """
    if inside_backward():
        return
    buffers = Buffers(running_mean, running_var, num_batches_tracked, momentum, running)
    share = _share(buffers, statistics)
    if ranks_in(group) == 1:
        _apply(buffers, share.unsqueeze(0))
    else:
        PENDING.setdefault((group, share.device), []).append(Pending(buffers, share))


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
    widest = torch.float32
    for _, share in pending:
        widest = torch.promote_types(widest, share.dtype)
    everyone = gather(torch.cat([share.to(widest).flatten() for _, share in pending]), group)
    pieces = everyone.split([share.numel() for _, share in pending], dim=1)
    for (buffers, share), piece in zip(pending, pieces, strict=True):
        _apply(buffers, piece.view(-1, *share.shape))


def _share(buffers: Buffers, statistics: Tensor) -> Tensor:
    """One rank's share (3, C): the number of its ghosts, and the sums of its means and variances.

    Sequential updates weigh the ghosts by how many come after them on this rank.
    """
    ghosts = statistics.shape[1]
    if buffers.running == "sequential" and buffers.momentum is not None:
        age = torch.arange(ghosts - 1, -1, -1, dtype=statistics.dtype, device=statistics.device)
        weights = buffers.momentum * torch.pow(1 - buffers.momentum, age)
        sums = torch.einsum("k,skc->sc", weights, statistics)
    else:
        sums = statistics.sum(1)
    return torch.cat([torch.full_like(sums[:1], ghosts), sums])


def _apply(buffers: Buffers, shares: Tensor) -> None:
    """Move the running statistics by the shares (ranks, 3, C), in the order of the ranks."""
    counts, sums = shares[:, 0], shares[:, 1:]
    mean_of_ghosts = buffers.running == "mean"
    if buffers.tracked is not None:
        buffers.tracked.add_(1 if mean_of_ghosts else counts[:, 0].sum().to(torch.long))
    now = torch.stack([buffers.mean, buffers.var]).to(shares.dtype)
    if buffers.momentum is not None and not mean_of_ghosts:
        for count, total in zip(counts, sums, strict=True):
            now = (1 - buffers.momentum) ** count * now + total
    elif buffers.momentum is not None:
        now = now + buffers.momentum * (sums.sum(0) / counts.sum(0) - now)
    elif buffers.tracked is not None:  # an average over n moves to that over the n + K now known
        new, total = counts.sum(0), sums.sum(0)
        if mean_of_ghosts:
            new, total = torch.ones_like(new), total / new
        now = now + (total - new * now) / buffers.tracked
    buffers.mean.copy_(now[0])
    buffers.var.copy_(now[1])


def _update_running_now(
    running_mean: Tensor,
    running_var: Tensor,
    num_batches_tracked: Tensor | None,
    statistics: Tensor,
    momentum: float | None,
    running: str,
    group: str | None,
) -> None:
    """As `update_running`, for compiled code.

    It must ask each time it runs whether it is being re-run. And the buffers that it is handed may
    be copies that live only as long as the call, so nothing can be left pending: ranks exchange
    their shares at once, layer by layer.
    """
    if inside_backward():
        return
    buffers = Buffers(running_mean, running_var, num_batches_tracked, momentum, running)
    share = _share(buffers, statistics)
    if ranks_in(group) == 1:
        _apply(buffers, share.unsqueeze(0))
    else:
        _exchange([Pending(buffers, share)], group)


update_running_op = torch.library.custom_op(
    "ghostbatch::update_running",
    _update_running_now,
    mutates_args=("running_mean", "running_var", "num_batches_tracked"),
)


@update_running_op.register_fake
def _(*_: object) -> None:
    """Nothing is returned."""
