"""A Regime as an ordinary PyTorch scheduler, stepped once per update."""

import warnings
from bisect import bisect_right
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ghostbatch.errors import InputError, check_is, check_positive
from ghostbatch.optim.groups import set_option
from ghostbatch.optim.regime import DEFAULT_MOMENTUM, DEFAULT_WEIGHT_DECAY, Rates, Regime, update_at


class RegimeScheduler(LRScheduler):
    """Sets learning rate and weight decay by a `Regime`; call ``step()`` after each update.

    Groups with the optimizer's default rate (or else the first group) get the regime's rate; other
    groups keep their ratio to it. Groups without weight decay stay without. If the regime was not
    given a weight decay, the optimizer keeps its own until a drop gives one. The momentum is always
    the optimizer's. A momentum or weight decay of the regime that differs from it causes a warning.

    Args:
        optimizer: any optimizer with "lr" and, if it decays weights, "weight_decay" groups.
        regime: already scaled for the batch: ``regime.scaled(lr_scale(batch, base_batch))``.
        samples_per_epoch: size of the training set.
        batch: samples per update, over all ranks; or the base batch, to keep its updates; or
            `rate_batch`, to keep the sum of the learning rates.
        phases: updates of each phase, if a batch that grows decides them: `phase_updates`.
        last_epoch: PyTorch's name for the last update done; -1 starts a run.

    """

    def __init__(
        self,
        optimizer: Optimizer,
        regime: Regime,
        *,
        samples_per_epoch: int,
        batch: int | Fraction,
        phases: Sequence[int] | None = None,
        last_epoch: int = -1,
    ) -> None:
        check_is("regime", regime, Regime, "a Regime")
        check_positive(samples_per_epoch=samples_per_epoch, batch=batch)
        self.regime = regime
        self.samples_per_epoch = samples_per_epoch
        self.batch = batch
        self._warmup_end = update_at(regime.warmup, samples_per_epoch, batch)
        self._drops = [update_at(drop[0], samples_per_epoch, batch) for drop in regime.drops]
        if phases is not None:
            if len(phases) != len(regime.drops) + 1:
                problem = f"{len(phases)} phases for {len(regime.drops)} drops of the regime"
                raise InputError("phases", problem, "give one more than drops")
            self._drops = list(accumulate(phases[:-1]))
        self._phases = [regime.phase(drops) for drops in range(len(regime.drops) + 1)]
        # Numbers, because reading a tensor on a GPU would wait for it at every step.
        self._own_lr = float(optimizer.defaults["lr"])
        if last_epoch == -1:
            self._note_initial_lr(optimizer)
        super().__init__(optimizer, last_epoch)
        self._warn_of_differences()

    def _warn_of_differences(self) -> None:
        """Warn if the regime was given a weight decay or momentum other than the optimizer's."""
        regime, groups = self.regime, self.optimizer.param_groups
        own = {group["initial_weight_decay"] for group in groups}
        own = (own - {0}) or own  # groups without weight decay stay without, if others have one
        if regime.weight_decay is not DEFAULT_WEIGHT_DECAY and own != {regime.weight_decay}:
            used = "the regime's" if any(own) else "the optimizer's"
            _warn("weight_decay", regime.weight_decay, own, used)
        own = {group["momentum"] for group in groups if "momentum" in group}
        if regime.momentum is not DEFAULT_MOMENTUM and own - {regime.momentum}:
            _warn("momentum", regime.momentum, own, "the optimizer's")

    def rates(self, update: int) -> Rates:
        """Return the regime's rates of the 0-based ``update``."""
        drops = bisect_right(self._drops, update)
        if update < self._warmup_end or self.regime.schedule != "drops":
            return self.regime.in_phase(drops, update, self.samples_per_epoch, self.batch)
        return self._phases[drops]

    def get_lr(self) -> list[Any]:
        """Return the learning rates of all groups for the next update; set their weight decay."""
        rates = self.rates(self.last_epoch)
        groups = self.optimizer.param_groups
        for group in groups:
            # In the group, like PyTorch's initial_lr: the regime's weight decay may become 0.
            decays = group.setdefault("initial_weight_decay", group.get("weight_decay", 0))
            if decays and rates.weight_decay is not DEFAULT_WEIGHT_DECAY:
                group["weight_decay"] = rates.weight_decay
        self._note_initial_lr(self.optimizer)  # groups may have joined
        initial = [group["initial_lr"] for group in groups]
        reference = self._own_lr if self._own_lr in initial else initial[0]
        if not reference:  # an optimizer built with lr=0 leaves the rate to the scheduler
            return [rates.lr for _ in groups]
        return [rates.lr * (base / reference) for base in initial]

    @staticmethod
    def _note_initial_lr(optimizer: Optimizer) -> None:
        """Note the rate of every group that has no initial rate yet."""
        for group in optimizer.param_groups:
            if "initial_lr" not in group:
                group["initial_lr"] = float(group["lr"])

    def state_dict(self) -> dict[str, Any]:
        """Return plain numbers only, so that a checkpoint loads with ``weights_only=True``."""
        names = ("initial_lr", "initial_weight_decay")
        return {
            "last_epoch": self.last_epoch,
            "groups": [{n: group[n] for n in names} for group in self.optimizer.param_groups],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue where ``state_dict`` was taken; set the optimizer's rates accordingly."""
        for group, initial in zip(self.optimizer.param_groups, state_dict["groups"], strict=True):
            group.update(initial)
        self.base_lrs = [group["initial_lr"] for group in self.optimizer.param_groups]
        self.last_epoch = state_dict["last_epoch"]
        self._step_count = self.last_epoch + 1
        for group, lr in zip(self.optimizer.param_groups, self.get_lr(), strict=True):
            set_option(group, "lr", lr)
        self._last_lr = [group["lr"] for group in self.optimizer.param_groups]


def _warn(field: str, given: float, own: set[float], used: str) -> None:
    """Warn that the regime and the optimizer differ, and say whose value is used."""
    values = ", ".join(f"{value:g}" for value in sorted(own))
    warnings.warn(
        f"regime.{field} is {given:g}, the optimizer has {values}: {used} is used; "
        "give both the same",
        stacklevel=4,  # the line that builds the scheduler
    )
