"""A scheduler that drops the learning rate when the weights have moved a given distance."""

from collections.abc import Callable, Sequence
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
from torch.optim import Optimizer

from ghostbatch.diagnostics.distance import WeightDistance
from ghostbatch.errors import InputError
from ghostbatch.files import DamagedError, parse_line, read_regular
from ghostbatch.optim import Rates, Regime, RegimeScheduler


class DistanceScheduler(RegimeScheduler):
    """A `RegimeScheduler` that drops the rate at given distances; step it after each update.

    The regime gives the rates, ``reached`` the distances at which they begin; the epochs of its
    drops are not used. The distance is measured after every update until the last drop.

    Args:
        optimizer, regime, samples_per_epoch, batch, last_epoch: as for `RegimeScheduler`.
        distance: returns the distance of the weights; with FSDP2, step on all ranks.
        reached: for each drop of the regime, the distance at which it happens; infinity for never.
        longest: for each drop, the number of updates since the one before it, or since the start,
            after which it happens anyway.

    >>> import torch
    >>> layer = torch.nn.Linear(1, 1, bias=False)
    >>> optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    >>> scheduler = DistanceScheduler(
    ...     optimizer, Regime(lr=0.1, epochs=9, drops=((5, 0.01),)), reached=[0.25],
    ...     distance=WeightDistance(layer), samples_per_epoch=10, batch=10)
    >>> rates = []
    >>> for _ in range(5):  # a constant gradient of 1: the weight moves by the rate
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
        """Number of updates done at each drop so far."""
        self._measure = distance.distance if isinstance(distance, WeightDistance) else distance
        self.follow(regime, reached, longest)
        sizes: dict[str, Any] = {"samples_per_epoch": samples_per_epoch, "batch": batch}
        super().__init__(optimizer, regime, **sizes, last_epoch=last_epoch)

    def follow(
        self, regime: Regime, reached: Sequence[float], longest: Sequence[int] | None = None
    ) -> None:
        """Drop at the distances ``reached`` from now on."""
        for field, values in (("reached", reached), ("longest", longest)):
            if values is not None and len(values) != len(regime.drops):
                problem = f"{len(values)} values for {len(regime.drops)} drops of the regime"
                raise InputError(field, problem, "give one for each")
        if not all(d > 0 for d in reached):
            raise InputError("reached", f"{list(reached)} are not all above 0", "use distances")
        self.reached = [float(d) for d in reached]
        self.longest = None if longest is None else [int(n) for n in longest]

    def step(self, epoch: int | None = None) -> None:
        """Drop the rate if the distance is reached, and set the rates of the next update."""
        while self.last_epoch >= 0 and self._drop_is_due():
            self.dropped.append(self.last_epoch + 1)
        super().step(epoch)

    def rates(self, update: int) -> Rates:
        """Return the rates of a past update, or of the next one."""
        drops = sum(1 for drop in self.dropped if drop <= update)
        return self.regime.in_phase(drops, update, self.samples_per_epoch, self.batch)

    def _drop_is_due(self) -> bool:
        phase = len(self.dropped)
        if phase == len(self.reached):
            return False
        start = self.dropped[-1] if self.dropped else 0
        if self.longest is not None and self.last_epoch + 1 - start >= self.longest[phase]:
            return True
        reached = self.reached[phase]
        return reached < inf and float(self._measure()) >= reached  # infinity needs no measurement

    def state_dict(self) -> dict[str, Any]:
        """Return plain numbers, with the distances to reach, so resuming needs no reference run."""
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
    """Return the weight distances of a run after ``updates``, from its ``metrics.jsonl``.

    Between two records the distance is interpolated linearly in log time. `ghostbatch.train` writes
    a record at every drop of the rate, so distances at drops are exact.
    """
    known: dict[int, float] = {}
    where, remedy = str(metrics), "name the metrics.jsonl of an intact run"
    try:
        for number, line in enumerate(read_regular(Path(metrics)).splitlines(), start=1):
            where = f"line {number} of {metrics}"
            record = parse_line(line)
            update, distance = int(record["update"]), record["distance"]
            if update > 0 and distance is not None:
                known[update] = float(distance)
    except (OSError, ValueError, TypeError, KeyError, DamagedError):
        raise InputError("reference", f"{where} cannot be read", remedy) from None
    times = sorted(known)
    for update in updates:
        if not times or not times[0] <= update <= times[-1]:
            problem = f"{metrics} does not reach update {update}"
            raise InputError("reference", problem, "finish that run first")
    found = np.interp(np.log(updates), np.log(times), [known[t] for t in times])
    return tuple(float(d) for d in found)
