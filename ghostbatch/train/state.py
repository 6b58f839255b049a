"""The state of a run: everything that a checkpoint holds."""

import warnings
from typing import Any

import torch
from torch import nn

from ghostbatch.data import Info
from ghostbatch.diagnostics import DistanceScheduler, WeightDistance
from ghostbatch.draws import key
from ghostbatch.nn import BatchPosition, find_model, fold_convolutions, key_dropout, to_ghost
from ghostbatch.nn.parts import join_gradients
from ghostbatch.optim import RegimeScheduler
from ghostbatch.recipe import Plan, Recipe
from ghostbatch.train.monitor import Monitor
from ghostbatch.train.reference import DropTargets

PARTS = ("model", "optimizer", "scheduler", "distance")
KERNELS = ("fused", "foreach")
"""Options of an optimizer that depend on its device, not on the run."""


class State:
    """The model, its optimizer, schedule and measurements after ``update`` updates."""

    def __init__(self, plan: Plan, info: Info, device: torch.device) -> None:
        recipe = plan.recipe
        self.plan, self.device = plan, device
        self.update = 0
        """Updates done."""
        self.seconds = 0.0
        """Seconds spent, up to the last checkpoint."""
        self.model = initial_model(recipe, info).to(device, parameter_dtype(recipe))
        if device.type == "cuda":  # convolutions are faster in this layout
            self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.optimizer = recipe.optimizer.build(self.model.parameters(), plan.regime)
        self.distance = WeightDistance(self.model)
        self.scheduler = self._build_scheduler()
        self._put_rates_on_device()
        self.monitor = Monitor(recipe.clip, device)
        position = BatchPosition(device)
        self.position = position if key_dropout(self.model, position) else None
        """Where dropout layers read which samples they see; None if there are none."""

    def _build_scheduler(self) -> RegimeScheduler:
        """Return the scheduler; one that holds the distance gets its targets later."""
        plan = self.plan
        sizes = {"samples_per_epoch": plan.samples, "batch": plan.held_batch}
        if plan.recipe.hold != "distance":
            return RegimeScheduler(self.optimizer, plan.regime, **sizes)
        reached, longest = DropTargets.unknown(plan)
        return DistanceScheduler(
            self.optimizer,
            plan.regime,
            distance=self.distance,
            reached=reached,
            longest=longest,
            **sizes,
        )

    def _put_rates_on_device(self) -> None:
        """On a GPU, keep the learning rates in tensors there, which a CUDA graph reads."""
        if self.device.type == "cuda":
            for group in self.optimizer.param_groups:
                group["lr"] = torch.tensor(float(group["lr"]), device=self.device)

    @property
    def drops(self) -> tuple[int, ...]:
        """The updates at which the rate drops; with hold "distance" those known so far."""
        if isinstance(self.scheduler, DistanceScheduler):
            return tuple(self.scheduler.dropped)
        return self.plan.drop_updates

    @property
    def end(self) -> int:
        """The number of updates of the run; an upper bound while a drop is still to come."""
        drops = self.drops
        if len(drops) < len(self.plan.regime.drops) or not drops:
            return self.plan.updates
        return drops[-1] + self.plan.phases[-1]

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain containers and tensors."""
        parts = {name: getattr(self, name).state_dict() for name in PARTS}
        for group in parts["optimizer"]["param_groups"]:
            group["lr"] = float(group["lr"])
        counts = {"update": self.update, "seconds": self.seconds}
        return {**parts, **self.monitor.state_dict(), **counts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue exactly where ``state`` was taken, also on another kind of device."""
        kernels = [{k: group[k] for k in KERNELS} for group in self.optimizer.param_groups]
        for name in PARTS:
            getattr(self, name).load_state_dict(state[name])
        for group, own in zip(self.optimizer.param_groups, kernels, strict=True):
            group.update(own)
        self._put_rates_on_device()
        self.monitor.load_state_dict(state)
        self.update, self.seconds = state["update"], state["seconds"]


def initial_model(recipe: Recipe, info: Info) -> nn.Module:
    """Return the network before its first update, drawn on the CPU: the same for every device."""
    channels, size, _ = info.shape
    torch.manual_seed(key(recipe.seed, "weights"))
    model = find_model(recipe.model)(info.classes, in_channels=channels, image_size=size)
    if recipe.ghost is not None:
        to_ghost(model, recipe.ghost, running=recipe.running)
    return model


def use_gpu_layers(model: nn.Module, recipe: Recipe, one_rank: bool) -> None:
    """Change a model on a GPU, in place, to faster layers that compute the same function.

    Plain batch norm on one rank becomes ghost norm with one ghost: its kernels are faster.
    """
    if recipe.ghost is None and recipe.precision != "fp64" and one_rank:
        with warnings.catch_warnings(action="ignore"):  # other kinds of norm stay as they are
            to_ghost(model, recipe.batch)
    if recipe.precision == "bf16":
        fold_convolutions(model)
    join_gradients(model)


def parameter_dtype(recipe: Recipe) -> torch.dtype:
    """Return the dtype of the weights: fp64 in fp64 runs, else fp32 (bf16 is autocast's)."""
    return torch.float64 if recipe.precision == "fp64" else torch.float32


def autocast(recipe: Recipe, device: torch.device) -> torch.autocast:
    """Return the autocast context of a recipe's precision; it can be entered many times."""
    return torch.autocast(device.type, torch.bfloat16, enabled=recipe.precision == "bf16")
