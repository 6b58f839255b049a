"""Drop the rate when the weights have walked as far as a reference had, not by the clock."""

import json
from collections.abc import Callable, Sequence
from math import inf, isnan
from pathlib import Path
from typing import Any

import numpy as np
from torch.optim import Optimizer

from ghostbatch.diagnostics.distance import WeightDistance
from ghostbatch.errors import InputError
from ghostbatch.optim import Rates, Regime, RegimeScheduler


class DistanceScheduler(RegimeScheduler):
    """A `RegimeScheduler` whose drops come when a distance is reached; step it after each update.

    The regime says what the rates are, ``reached`` when they come; its epochs count for warm-up
    only. A distance is measured after every update until the last drop.

    Args:
        optimizer: as for `RegimeScheduler`.
        regime: as for `RegimeScheduler`.
        distance: measures how far the weights are; with FSDP2, step on all ranks.
        reached: for each drop of the regime, the distance at which it comes; infinity never does.
        longest: for each drop, after how many updates since the one before it comes at the latest.
        samples_per_epoch: size of the training set.
        batch: samples per update, over all ranks.
        last_epoch: PyTorch's name for the last update done; -1 starts a run.

    >>> import torch
    >>> layer = torch.nn.Linear(1, 1, bias=False)
    >>> optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    >>> scheduler = DistanceScheduler(
    ...     optimizer, Regime(lr=0.1, epochs=9, drops=((5, 0.01),)), reached=[0.25],
    ...     distance=WeightDistance(layer), samples_per_epoch=10, batch=10)
    >>> rates = []
    >>> for _ in range(5):  # a constant gradient of 1: the weight walks by the rate
    ...     layer.weight.grad = torch.ones(1, 1)
    ...     optimizer.step()
    ...     scheduler.step()
    ...     rates += scheduler.get_last_lr()
    >>> rates, scheduler.dropped
    ([0.1, 0.1, 0.01, 0.01, 0.01], [3])

    """

    def __init__(
        self,
        optimizer: Optimizer,
        regime: Regime,
        *,
        distance: WeightDistance | Callable[[], float],
        reached: Sequence[float],
        longest: Sequence[int] | None = None,
        samples_per_epoch: int,
        batch: int,
        last_epoch: int = -1,
    ) -> None:
        self.dropped: list[int] = []
        """Updates that had been done when the rate dropped."""
        self._distance = distance
        self.follow(regime, reached, longest)
        super().__init__(
            optimizer,
            regime,
            samples_per_epoch=samples_per_epoch,
            batch=batch,
            last_epoch=last_epoch,
        )

    def follow(
        self, regime: Regime, reached: Sequence[float], longest: Sequence[int] | None = None
    ) -> None:
        """Drop at these distances from now on."""
        for field, values in (("reached", reached), ("longest", longest)):
            if values is not None and len(values) != len(regime.drops):
                raise InputError(
                    field,
                    f"{len(values)} values for {len(regime.drops)} drops of the regime",
                    "give one for each",
                )
        if any(isnan(d) or d <= 0 for d in reached):
            raise InputError("reached", f"{list(reached)} are not all above 0", "use distances")
        self.reached = [float(d) for d in reached]
        self.longest = None if longest is None else [int(n) for n in longest]

    def step(self, epoch: int | None = None) -> None:
        """Look how far the weights are, and set the rates of the coming update."""
        while self.last_epoch >= 0 and self._arrived():
            self.dropped.append(self.last_epoch + 1)
        super().step(epoch)

    def rates(self, update: int) -> Rates:
        """The rates of one update that was done, or of the coming one."""
        drops = sum(1 for drop in self.dropped if drop <= update)
        return self.regime.in_phase(drops, update, self.samples_per_epoch, self.batch)

    def _arrived(self) -> bool:
        phase = len(self.dropped)
        if phase == len(self.reached):
            return False
        began = self.dropped[-1] if self.dropped else 0
        if self.longest is not None and self.last_epoch + 1 - began >= self.longest[phase]:
            return True
        if self.reached[phase] == inf:
            return False
        now = self._distance
        return (
            float(now.distance() if isinstance(now, WeightDistance) else now())
            >= (self.reached[phase])
        )

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers; what is followed is among them: a resumed run needs no reference."""
        return {
            **super().state_dict(),
            "dropped": list(self.dropped),
            "reached": list(self.reached),
            "longest": self.longest and list(self.longest),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue where ``state_dict`` was taken."""
        self.dropped = list(state_dict["dropped"])
        self.follow(self.regime, state_dict["reached"], state_dict["longest"])
        super().load_state_dict(state_dict)


def distances_at(metrics: str | Path, updates: Sequence[int]) -> tuple[float, ...]:
    """The distances that a run had walked after so many updates, from its ``metrics.jsonl``.

    Between two records the distance is taken to be linear in log time; `ghostbatch.train` writes a
    record at every drop of the rate, and there nothing is guessed.
    """
    known: dict[int, float] = {}
    try:
        for line in Path(metrics).read_text().splitlines():
            record = json.loads(line)
            if record["update"] > 0 and record["distance"] is not None:
                known[int(record["update"])] = float(record["distance"])
    except (OSError, ValueError, TypeError, KeyError):
        raise InputError(
            "reference", f"{metrics} cannot be read", "name the run's metrics.jsonl"
        ) from None
    times = sorted(known)
    for update in updates:
        if not times or not times[0] <= update <= times[-1]:
            raise InputError(
                "reference", f"{metrics} does not reach update {update}", "let that run end first"
            )
    found = np.interp(np.log(updates), np.log(times), [known[t] for t in times])
    return tuple(float(d) for d in found)
