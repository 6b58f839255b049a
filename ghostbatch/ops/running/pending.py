"""The contributions of this rank that wait for those of the other ranks."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ghostbatch.ops.running.groups import Group
from ghostbatch.ops.running.stats import RunningStats
from ghostbatch.ops.running.update import Contribution, apply_contributions


@dataclass(eq=False)
class Pending:
    """A contribution, and the statistics that it will update."""

    running: RunningStats
    own: Contribution


class Waiting:
    """The pending contributions of one group on one device, oldest first."""

    def __init__(self) -> None:
        self.pending: list[Pending] = []
        self._newest: dict[int, Pending] = {}  # of each layer, by the id of its running mean
        self._before: dict[int, tuple[RunningStats, list[Tensor]]] = {}

    def add(self, running: RunningStats, own: Contribution) -> None:
        """Keep a contribution until the next exchange."""
        newest = self._newest.get(id(running.mean))
        if newest is not None and _averages(running) and _averages(newest.running):
            # The order of ghosts does not matter, so ranks may have had unequally many batches.
            ghosts, sums = newest.own
            newest.own = Contribution(ghosts + own.ghosts, sums + own.sums)
            return
        self._newest[id(running.mean)] = pending = Pending(running, own)
        self.pending.append(pending)

    def update_alone(self, running: RunningStats, own: Contribution) -> None:
        """Update statistics by this rank's contribution; keep a copy of what they were."""
        if id(running.mean) not in self._before:
            copies = [buffer.clone() for buffer in running.buffers()]
            self._before[id(running.mean)] = running, copies
        apply_contributions(running, [own])

    def take(self, wanted: Callable[[RunningStats], bool]) -> list[Pending]:
        """Remove and return the wanted contributions; undo the updates by this rank alone."""
        taken = [pending for pending in self.pending if wanted(pending.running)]
        for key in {id(pending.running.mean) for pending in taken}:
            if key in self._before:
                running, copies = self._before[key]
                for buffer, copy in zip(running.buffers(), copies, strict=True):
                    buffer.copy_(copy)
        self.drop(wanted)
        return taken

    def drop(self, wanted: Callable[[RunningStats], bool]) -> None:
        """Remove the wanted contributions."""
        for pending in self.pending:
            if wanted(pending.running):
                self._newest.pop(id(pending.running.mean), None)
                self._before.pop(id(pending.running.mean), None)
        self.pending = [pending for pending in self.pending if not wanted(pending.running)]


def _averages(running: RunningStats) -> bool:
    """Whether the statistics are the average over all ghosts so far."""
    return running.momentum is None and running.policy == "sequential"


PENDING: dict[tuple[Group, torch.device], Waiting] = {}


def waiting_for(group: Group, device: torch.device) -> Waiting:
    """Return the contributions that wait for an exchange in this group."""
    return PENDING.setdefault((group, device), Waiting())


def take_pending(
    wanted: Callable[[RunningStats], bool],
) -> dict[tuple[Group, torch.device], list[Pending]]:
    """Remove and return the wanted contributions of each group and device that has any."""
    taken = {key: waiting.take(wanted) for key, waiting in PENDING.items()}
    _clean()
    return {key: pending for key, pending in taken.items() if pending}


def forget_pending(mean: Tensor | None) -> None:
    """Drop the contributions to a layer whose statistics are replaced, as by a reset."""
    for waiting in PENDING.values():
        waiting.drop(lambda running: running.mean is mean)
    _clean()


def _clean() -> None:
    for key in [key for key, waiting in PENDING.items() if not waiting.pending]:
        del PENDING[key]
