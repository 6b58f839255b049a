"""Everything that changes during a run, so that a checkpoint is all of it."""

from typing import Any

import torch
from torch import nn
from torch.optim import SGD

from ghostbatch.data import Info
from ghostbatch.diagnostics import DistanceScheduler, WeightDistance
from ghostbatch.draws import key
from ghostbatch.nn import BatchPosition, find_model, key_dropout, to_ghost
from ghostbatch.optim import RegimeScheduler
from ghostbatch.recipe import Plan, Recipe
from ghostbatch.train.reference import DropTargets
from ghostbatch.train.step import Tally
from ghostbatch.train.watch import Watch


class State:
    """The model, its optimizer and schedule, and what is counted, after ``update`` updates."""

    def __init__(self, plan: Plan, info: Info, device: torch.device) -> None:
        recipe, regime = plan.recipe, plan.regime
        self.device, self.plan = device, plan
        self.update = 0
        self.seconds = 0.0
        self.model = initial_model(recipe, info).to(device, parameter_dtype(recipe))
        if device.type == "cuda":  # where convolutions are faster so
            self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.optimizer = SGD(
            self.model.parameters(),
            lr=regime.lr,
            momentum=regime.momentum,
            weight_decay=regime.weight_decay,
        )
        self.distance = WeightDistance(self.model)
        self.scheduler = self._schedule()
        self.tally = Tally()
        self.watch = Watch()
        self.position = BatchPosition(device)
        key_dropout(self.model, self.position)

    def _schedule(self) -> RegimeScheduler:
        """By the clock, or by distance; then `follow` says by which."""
        plan, legs = self.plan, DropTargets.unknown(self.plan)
        if plan.recipe.hold != "distance":
            return RegimeScheduler(
                self.optimizer, plan.regime, samples_per_epoch=plan.samples, batch=plan.held_batch
            )
        return DistanceScheduler(
            self.optimizer,
            plan.regime,
            distance=self.distance,
            reached=legs.reached,
            longest=legs.longest,
            samples_per_epoch=plan.samples,
            batch=plan.held_batch,
        )

    def follow(self, legs: DropTargets) -> None:
        """Drop the rate where the reference had dropped it."""
        if isinstance(self.scheduler, DistanceScheduler):
            self.scheduler.follow(self.plan.regime, *legs)

    @property
    def drops(self) -> tuple[int, ...]:
        """Updates at which the rate has dropped, or will by the clock."""
        if isinstance(self.scheduler, DistanceScheduler):
            return tuple(self.scheduler.dropped)
        return self.plan.drop_updates

    @property
    def end(self) -> int:
        """The update after which the run ends; at most, while a drop is still to come."""
        if len(self.drops) < len(self.plan.regime.drops) or not self.drops:
            return self.plan.updates
        return self.drops[-1] + self.plan.phases[-1]

    def _parts(self) -> dict[str, Any]:
        names = ("model", "optimizer", "scheduler", "distance", "tally", "watch")
        return {name: getattr(self, name) for name in names}

    def state_dict(self) -> dict[str, Any]:
        """Plain containers and tensors."""
        parts = {name: part.state_dict() for name, part in self._parts().items()}
        return {**parts, "update": self.update, "seconds": self.seconds}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue exactly where ``state`` was taken."""
        for name, part in self._parts().items():
            part.load_state_dict(state[name])
        self.update, self.seconds = state["update"], state["seconds"]


def initial_model(recipe: Recipe, info: Info) -> nn.Module:
    """The network before its first update: drawn on the CPU, so the same on every device."""
    channels, size, _ = info.shape
    torch.manual_seed(key(recipe.seed, "weights"))
    model = find_model(recipe.model)(info.classes, in_channels=channels, image_size=size)
    if recipe.ghost is not None:
        to_ghost(model, recipe.ghost, running=recipe.running)
    return model


def parameter_dtype(recipe: Recipe) -> torch.dtype:
    """Weights are fp32 except in fp64 runs; bf16 is a matter of autocast."""
    return torch.float64 if recipe.precision == "fp64" else torch.float32
