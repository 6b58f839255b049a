"""The update of running statistics on one rank or many.

On one rank it happens at once. On many, each rank's contribution is kept as pending until the end
of backward; then one small collective for all layers together brings the contributions to every
rank.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import Variable

from ghostbatch.ops.running.groups import Group, gather, ranks_in
from ghostbatch.ops.running.stats import RunningStats
from ghostbatch.ops.running.update import Contribution, apply_contributions, contribution


class Pending(NamedTuple):
    """A contribution of this rank that waits for those of the other ranks."""

    running: RunningStats
    contribution: Contribution


PENDING: dict[tuple[Group, torch.device], list[Pending]] = {}
_queued_for: int | None = None  # graph task of the backward that will exchange them at its end


def inside_backward() -> bool:
    """Whether autograd is running: then a forward is a re-run by activation checkpointing."""
    return torch._C._current_graph_task_id() != -1


def updates_in_forward(group: Group) -> bool:
    """Whether the forward may update running statistics: on one rank, and not in a re-run."""
    return ranks_in(group) == 1 and not inside_backward()


def update_running(
    running: RunningStats, moments: Tensor, group: Group, *, defer: bool = True
) -> None:
    """Update running statistics by the ghosts' means and variances (2, K, C), oldest first.

    ``defer`` leaves the exchange with other ranks to the end of backward. A forward that activation
    checkpointing re-runs inside backward does not count again.
    """
    if inside_backward():
        return
    own = contribution(running, moments)
    if ranks_in(group) == 1:
        apply_contributions(running, [own])
    elif defer:
        PENDING.setdefault((group, own.sums.device), []).append(Pending(running, own))
    else:
        _exchange([Pending(running, own)], group)


def exchange_after_backward() -> None:
    """Queue the exchange of pending contributions for the end of the current backward."""
    global _queued_for  # noqa: PLW0603
    backward = torch._C._current_graph_task_id()
    if PENDING and backward != _queued_for:
        _queued_for = backward
        Variable._execution_engine.queue_callback(exchange_pending)


@torch.no_grad()
def exchange_pending(wanted: Callable[[RunningStats], bool] = lambda _: True) -> None:
    """Exchange the wanted pending contributions: one collective per group and device."""
    for (group, device), waiting in list(PENDING.items()):
        now = [pending for pending in waiting if wanted(pending.running)]
        PENDING[group, device] = [pending for pending in waiting if not wanted(pending.running)]
        if not PENDING[group, device]:
            del PENDING[group, device]
        if now:
            _exchange(now, group)


def _exchange(pending: Sequence[Pending], group: Group) -> None:
    """Send all contributions as one vector, receive every rank's, and apply them."""
    widest = torch.float32
    for _, own in pending:
        widest = torch.promote_types(widest, own.sums.dtype)
    parts = []
    for _, (ghosts, sums) in pending:
        count = torch.as_tensor(ghosts, dtype=widest, device=sums.device)
        parts += [count.view(1), sums.flatten().to(widest)]
    everyone = gather(torch.cat(parts), group).split([part.numel() for part in parts], dim=1)
    for (running, own), counts, sums in zip(pending, everyone[::2], everyone[1::2], strict=True):
        by_rank = zip(counts.unbind(), sums.unbind(), strict=True)
        apply_contributions(
            running, [Contribution(count, row.view_as(own.sums)) for count, row in by_rank]
        )
