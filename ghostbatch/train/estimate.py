"""What a run would need, measured on a few of its samples."""

import time
from dataclasses import dataclass
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

from ghostbatch.data import Info
from ghostbatch.recipe import Plan
from ghostbatch.train.split import split_batch
from ghostbatch.train.state import State, parameter_dtype

PROBE = 32
"""Samples that are tried at most."""


@dataclass(frozen=True)
class Estimate:
    """For one rank; the data set and the memory that libraries take are not counted."""

    bytes: int
    """Weights, gradients, momentum, the initial weights, and what backward needs of a piece."""
    seconds: float
    """Of forward and backward; optimizer, data and looking at the test set come on top."""
    parameters: int


def estimate(plan: Plan, info: Info, device: torch.device, micro: int | None = None) -> Estimate:
    """Run forward and backward of a small piece of random images, and scale up."""
    recipe = plan.recipe
    with torch.random.fork_rng(devices=[] if device.type == "cpu" else [device]):
        state = State(plan, info, device)
        cut = split_batch(recipe, state.model, micro, world=1)
        samples = min(cut.shard, PROBE)
        layout = torch.channels_last if device.type == "cuda" else torch.contiguous_format
        images = torch.randn(
            (samples, *info.shape), device=device, dtype=parameter_dtype(recipe)
        ).to(memory_format=layout)
        labels = torch.randint(info.classes, (samples,), device=device)
        kept = 0
        spent = []
        for _ in range(3):  # the first one warms up
            began = _now(device)
            kept = _pass(state, images, labels, recipe.precision == "bf16")
            spent.append(_now(device) - began)
    weights = [p for p in state.model.parameters() if p.requires_grad]
    fixed = 4 * sum(p.numel() * p.element_size() for p in weights)
    return Estimate(
        bytes=fixed + round(kept / samples * cut.shard),
        seconds=min(spent[1:]) / samples * recipe.batch * plan.updates,
        parameters=sum(p.numel() for p in weights),
    )


def _pass(state: State, images: Tensor, labels: Tensor, half: bool) -> int:
    """One forward and backward; return the bytes that were kept between them."""
    storages: dict[int, int] = {}
    weights = {p.untyped_storage().data_ptr() for p in state.model.parameters()}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        torch.autocast(images.device.type, torch.bfloat16, enabled=half),
    ):
        loss = F.cross_entropy(state.model(images), labels)
    loss.backward()
    return sum(storages.values())


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def data_bytes(info: Info) -> int:
    """What the data set takes on the device, if it lives there: one byte a value."""
    return (info.samples + info.test_samples) * prod(info.shape)
