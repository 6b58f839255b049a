"""The state of a run: everything that a checkpoint holds."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ghostbatch.data import Info, SkippedImages, is_folder
from ghostbatch.diagnostics import DistanceScheduler, WeightDistance
from ghostbatch.draws import key
from ghostbatch.errors import InputError
from ghostbatch.nn import (
    MODELS,
    BatchPosition,
    convert_layers,
    convertible,
    find_model,
    fold_convolutions,
    initialise_glorot,
    join_gradients,
    key_dropout,
    to_ghost,
    unconvertible,
)
from ghostbatch.nn.fold import PatchConv2d
from ghostbatch.nn.norm import GhostBatchNorm
from ghostbatch.ops import backend_name
from ghostbatch.ops.running.groups import ranks_in
from ghostbatch.optim import RegimeScheduler, WeightAverage, norm_groups
from ghostbatch.recipe import Plan, Recipe
from ghostbatch.train.device import PROCESS
from ghostbatch.train.monitor import Monitor
from ghostbatch.train.reference import DropTargets

PARTS = ("model", "optimizer", "scheduler", "distance", "monitor", "skipped")
"""The attributes of a state with a state_dict of their own."""
KERNELS = ("fused", "foreach", "capturable")
"""Options of some optimizers that depend on their device, not on the run."""


class State:
    """The model, its optimizer, schedule and measurements after ``update`` updates."""

    def __init__(self, plan: Plan, info: Info, device: torch.device) -> None:
        recipe = plan.recipe
        self.plan, self.device, self.info = plan, device, info
        self.update = 0
        """Updates done."""
        self.seconds = 0.0
        """Seconds spent, up to the last checkpoint."""
        self.model = initial_model(recipe, info).to(device, parameter_dtype(recipe))
        if device.type == "cuda":  # convolutions are faster in this layout
            self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        options = dict(recipe.optimizer.norm_options)
        if not recipe.decay_norms:
            options["weight_decay"] = 0.0
        parameters = norm_groups(self.model, **options) if options else self.model.parameters()
        sizes = {"batch": recipe.batch, "base_batch": recipe.base_batch}
        spec = recipe.optimizer.scaled(**sizes, rule=recipe.lr_rule)
        self.optimizer = spec.build(parameters, plan.regime)
        self.distance = WeightDistance(self.model)
        decay = recipe.ema
        self.average = None if decay is None else WeightAverage(self.model, decay, **sizes)
        self.scheduler = self._build_scheduler()
        self._put_rates_on_device()
        self.monitor = Monitor(recipe.clip, device)
        self.skipped = SkippedImages()
        position = BatchPosition(device)
        self.position = position if key_dropout(self.model, position) else None
        """Where dropout layers read which samples they see; None if there are none."""

    def _build_scheduler(self) -> RegimeScheduler:
        """Return the scheduler; one that holds the distance gets its targets later."""
        plan = self.plan
        sizes: dict[str, Any] = {"samples_per_epoch": plan.samples, "batch": plan.held_batch}
        if plan.recipe.hold != "distance":
            return RegimeScheduler(self.optimizer, plan.regime, phases=plan.phases, **sizes)
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
        """On a GPU, keep the learning rates in tensors there, which a CUDA graph reads.

        The optimizer's kernels read them as fp32, so fp64 runs keep numbers, and have no graph.
        """
        if self.device.type == "cuda" and self.plan.recipe.precision != "fp64":
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

    @property
    def _parts(self) -> tuple[str, ...]:
        return PARTS if self.average is None else (*PARTS, "average")

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain containers and tensors."""
        parts = {name: getattr(self, name).state_dict() for name in self._parts}
        for group in parts["optimizer"]["param_groups"]:
            group["lr"] = float(group["lr"])
        return {**parts, "update": self.update, "seconds": self.seconds}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue exactly where ``state`` was taken, also on another kind of device."""
        check_same_network(self.plan.recipe.model, self.model, state["model"])
        groups = self.optimizer.param_groups
        kernels = [{k: group[k] for k in KERNELS if k in group} for group in groups]
        for name in self._parts:
            getattr(self, name).load_state_dict(state[name])
        for group, own in zip(self.optimizer.param_groups, kernels, strict=True):
            group.update(own)
        for weight, kept in self.optimizer.state.items():  # laid out as another device's weights
            for name, value in kept.items():
                if isinstance(value, Tensor) and value.shape == weight.shape:
                    kept[name] = torch.empty_like(weight).copy_(value)
        self._put_rates_on_device()
        self.update, self.seconds = state["update"], state["seconds"]


def initial_model(recipe: Recipe, info: Info) -> nn.Module:
    """Return the network before its first update, drawn on the CPU: the same for every device."""
    model = plain_model(recipe, info)
    if recipe.ghost is not None:
        _check_convertible(recipe, model)
        to_ghost(model, recipe.ghost, running=recipe.running)
    return model


@contextmanager
def _default_generator() -> Iterator[None]:
    """Keep PyTorch's default generators to one thread, and leave them as they were.

    Networks draw their weights from them, and runs in other threads may build theirs.
    """
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with PROCESS, torch.random.fork_rng(devices=list(devices)):
        yield


def can_share_process(recipe: Recipe) -> bool:
    """Return whether other runs may run in other threads of the same process.

    PyTorch's default generators belong to the process. Networks that are not ours may draw from
    them in every update, and the DataLoader of an image folder does. Our networks draw only their
    first weights from them; everything else has generators of its own.
    """
    return recipe.model in MODELS and not is_folder(recipe.data)


@_default_generator()
def plain_model(recipe: Recipe, info: Info) -> nn.Module:
    """Return the network before its first update, with the norm layers that its builder chose."""
    channels, size, _ = info.shape
    torch.manual_seed(key(recipe.seed, "weights"))
    model = find_model(recipe.model)(info.classes, in_channels=channels, image_size=size)
    _check_weights(recipe.model, list(model.parameters()))
    if recipe.init == "glorot":
        initialise_glorot(model)
    return model


def _check_weights(name: str, weights: list[nn.Parameter]) -> None:
    """Refuse a network that cannot be trained."""
    if any(map(is_lazy, weights)):
        raise InputError("model", f"{name} has lazy layers", "give the sizes of their inputs")
    if not any(weight.requires_grad for weight in weights):
        raise InputError("model", f"{name} has no trainable parameters", "set requires_grad")


def _check_convertible(recipe: Recipe, model: nn.Module) -> None:
    """Refuse a ghost size that some or all norm layers would not have."""
    stays = list(unconvertible(model))
    if stays:
        more = f" and {len(stays) - 3} more" if len(stays) > 3 else ""
        raise InputError(
            "ghost",
            f"{', '.join(stays[:3])}{more} in {recipe.model} cannot be converted to ghost layers",
            "set ghost to None, or let gb.register_conversion know the class",
        )
    if not convertible(model):
        raise InputError("ghost", f"{recipe.model} has no batch norm layers", "set ghost to None")


def check_same_network(name: str, model: nn.Module, saved: dict[str, Tensor]) -> None:
    """Refuse weights of a network whose parameters had other names, shapes or another order."""
    shapes = {each: tuple(tensor.shape) for each, tensor in model.state_dict().items()}
    before = {each: tuple(tensor.shape) for each, tensor in saved.items()}
    changes = (
        *(f"has no {each} any more" for each in before if each not in shapes),
        *(f"has a new {each}" for each in shapes if each not in before),
        *(
            f"now has {each} of shape {shape}, not {before[each]}"
            for each, shape in shapes.items()
            if before.get(each, shape) != shape
        ),
        *(
            f"now has {each} where it had {was}"
            for each, was in zip(shapes, before, strict=False)
            if each != was
        ),
    )
    if changes:
        remedy = "restore it as it was when this run began, or choose another folder"
        raise InputError("model", f"{name} {changes[0]}", remedy)


ONE_GHOST = 2**31
"""A ghost size that no batch reaches, so that each batch is one ghost."""


def use_gpu_layers(model: nn.Module, recipe: Recipe, one_rank: bool) -> None:
    """Change a model on a GPU, in place, to faster layers that compute the same function.

    Plain batch norm on one rank becomes ghost norm with one ghost: its kernels are faster. Our own
    networks are also folded, and add gradients inside their norms.
    """
    if one_rank and _is_one_ghost(recipe):
        plain = (norm for norm in convertible(model) if not isinstance(norm, GhostBatchNorm))
        convert_layers(plain, ONE_GHOST)
    if recipe.model in MODELS:
        if recipe.precision == "bf16":
            fold_convolutions(model)
        join_gradients(model)


def image_format(model: nn.Module, recipe: Recipe, device: torch.device) -> dict[str, Any]:
    """Return the dtype of the images and the patches that a feed makes for a model.

    Our own networks begin with a layer that autocast lowers; on a GPU it gets lowered images.
    """
    if not (device.type == "cuda" and recipe.model in MODELS and recipe.precision == "bf16"):
        return {"dtype": parameter_dtype(recipe)}
    kernels = [m.kernel_size[0] for m in model.modules() if isinstance(m, PatchConv2d)]
    return {"dtype": torch.bfloat16, "patch": max(kernels, default=1)}


def _is_one_ghost(recipe: Recipe) -> bool:
    """Return whether plain batch norm on a GPU is computed as one ghost; no kernel has fp64."""
    return recipe.ghost is None and recipe.precision != "fp64"


def parameter_dtype(recipe: Recipe) -> torch.dtype:
    """Return the dtype of the weights: fp64 in fp64 runs, else fp32 (bf16 is autocast's)."""
    return torch.float64 if recipe.precision == "fp64" else torch.float32


def norm_backend(recipe: Recipe, device: torch.device) -> str:
    """Return which code normalises in training: "c", "triton" or "tensor", or else "pytorch"."""
    on_one_gpu = device.type == "cuda" and ranks_in(None) == 1
    if recipe.ghost is None and not (on_one_gpu and _is_one_ghost(recipe)):
        return "pytorch"
    dtype = torch.bfloat16 if recipe.precision == "bf16" else parameter_dtype(recipe)
    return backend_name(device, dtype)


def autocast(recipe: Recipe, device: torch.device) -> torch.autocast:
    """Return the autocast context of a recipe's precision; it can be entered many times."""
    return torch.autocast(device.type, torch.bfloat16, enabled=recipe.precision == "bf16")
