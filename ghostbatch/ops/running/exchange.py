"""The update of running statistics on one rank or many.

On one rank it happens at once. On many, each rank's contribution is kept as pending until the end
of backward; then one small collective for all layers together brings the contributions to every
rank (`channel` says how, and what happens if ranks differ). A rank with an empty batch contributes
no ghosts, and takes part all the same.

Without gradients there may never be a backward, and ranks may run unequally many forwards, as in
``torch.optim.swa_utils.update_bn``. There a rank updates its statistics by its own contribution at
once, and keeps a copy of what they were. The next exchange starts from that copy, so afterwards
they are exact. If all ranks have run the same forwards, the next backward brings that exchange;
if they may have run different numbers of them, `sync_layers` does.

A rank that sends nothing, because it does not run this backward or has stopped, is not noticed at
once. The others wait until that rank runs its next backward, in which the mismatch shows, until it
ends, or until the time-out of their process group.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel

from ghostbatch.errors import RankError
from ghostbatch.ops.running.channel import encode_widths, mismatch, open_channel
from ghostbatch.ops.running.groups import Group, gather_objects, ranks_in
from ghostbatch.ops.running.pending import PENDING, Pending, take_pending, waiting_for
from ghostbatch.ops.running.stats import RunningStats
from ghostbatch.ops.running.update import Contribution, apply_contributions, contribution

_queued_for: int | None = None  # graph task of the backward that will exchange what is pending


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
        return
    _refuse_join()
    if not defer:
        _exchange([Pending(running, own)], group)
        return
    waiting = waiting_for(group, own.sums.device)
    waiting.add(running, own)
    if not torch.is_grad_enabled():
        waiting.update_alone(running, own)


def _refuse_join() -> None:
    """Refuse DDP's join: a rank that has joined early sends nothing more, and the others hang."""
    # Private names, but the only trace of the context; without them the wait ends in a time-out.
    active: Any = getattr(DistributedDataParallel, "_active_ddp_module", None)
    config = getattr(active, "_join_config", None)
    if getattr(config, "enable", False):
        raise RankError(
            "running statistics: under DDP's join a rank may end before the others, and cannot "
            "take part in their exchange; give it empty batches instead, or keep statistics to "
            "each rank with process_group=gb.LOCAL"
        )


def exchange_after_backward() -> None:
    """Queue the exchange of pending contributions for the end of the current backward."""
    global _queued_for  # noqa: PLW0603
    backward = torch._C._current_graph_task_id()
    if PENDING and backward != _queued_for:
        _queued_for = backward
        Variable._execution_engine.queue_callback(exchange_pending)


@torch.no_grad()
def exchange_pending() -> None:
    """Exchange all pending contributions: one collective per group and device."""
    for (group, _), pending in take_pending(lambda _: True).items():
        _exchange(pending, group)


def _exchange(pending: Sequence[Pending], group: Group) -> None:
    """Send this rank's contributions, receive every rank's, and apply them."""
    own = [each.own for each in pending]
    channel = open_channel(group, own[0].sums.device)
    by_layer = channel.exchange([each.running for each in pending], own)
    for each, contributions in zip(pending, by_layer, strict=True):
        apply_contributions(each.running, contributions)


@torch.no_grad()
def sync_layers(layers: Sequence[RunningStats], group: Group) -> None:
    """Exchange what is pending for these layers of one device, on all ranks of the group.

    Ranks may have run a layer different numbers of times; a rank contributes no ghosts to a forward
    that it has not run. So ranks first tell each other what they have. On one rank this does
    nothing.
    """
    if ranks_in(group) == 1 or not layers:
        return
    keys = {id(layer.mean) for layer in layers}
    taken = take_pending(lambda running: id(running.mean) in keys)
    own: dict[int, list[Pending]] = {key: [] for key in keys}
    for each in (pending for some in taken.values() for pending in some):
        own[id(each.running.mean)].append(each)
    rules = [
        [(each.running.momentum, each.running.policy) for each in own[id(layer.mean)]]
        for layer in layers
    ]
    everyone = gather_objects((encode_widths(layers), rules), group)
    widths = [each for each, _ in everyone]
    if len(set(widths)) > 1:
        raise mismatch(widths, layers)
    pending = []
    for layer, *by_rank in zip(layers, *(each for _, each in everyone), strict=True):
        mine = own[id(layer.mean)]
        longest: list[Any] = max(by_rank, key=len)
        pending += mine + [_without_ghosts(layer, *rule) for rule in longest[len(mine) :]]
    if pending:
        _exchange(pending, group)


def _without_ghosts(layer: RunningStats, momentum: float | None, policy: str) -> Pending:
    """Return the contribution to a forward that only other ranks have run."""
    dtype = torch.promote_types(layer.mean.dtype, torch.float32)
    sums = torch.zeros(2, layer.mean.numel(), dtype=dtype, device=layer.mean.device)
    return Pending(replace(layer, momentum=momentum, policy=policy), Contribution(0, sums))
