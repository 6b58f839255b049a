"""Memory and time that a run would need, measured on a few samples."""

import time
from dataclasses import dataclass
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

from ghostbatch.data import Info
from ghostbatch.recipe import Plan
from ghostbatch.train.evaluate import check_outputs
from ghostbatch.train.split import split_batch
from ghostbatch.train.state import State, autocast, parameter_dtype

PROBE = 32
"""Largest number of samples to measure with."""


@dataclass(frozen=True)
class Estimate:
    """What one rank needs, without the data set and the memory of libraries."""

    bytes: int
    """Weights, gradients, momentum, initial weights, and the activations of a micro-batch."""
    seconds: float
    """Time of forward and backward, without optimizer, data and evaluation."""
    parameters: int


def estimate(plan: Plan, info: Info, device: torch.device, micro: int | None = None) -> Estimate:
    """Time forward and backward of a few random images, and scale up to the run."""
    recipe = plan.recipe
    with torch.random.fork_rng(devices=[] if device.type == "cpu" else [device]):
        state = State(plan, info, device)
        split = split_batch(recipe, state.model, micro, world=1)
        check_outputs(state, info)
        samples = min(split.shard, PROBE)
        layout = torch.channels_last if device.type == "cuda" else torch.contiguous_format
        images = torch.randn(
            (samples, *info.shape), device=device, dtype=parameter_dtype(recipe)
        ).to(memory_format=layout)
        labels = torch.randint(info.classes, (samples,), device=device)
        kept = 0
        spent = []
        for _ in range(3):  # the first one warms up
            began = _now(device)
            kept = _pass(state, images, labels)
            spent.append(_now(device) - began)
    weights = [p for p in state.model.parameters() if p.requires_grad]
    fixed = 4 * sum(p.numel() * p.element_size() for p in weights)
    return Estimate(
        bytes=fixed + round(kept / samples * split.shard),
        seconds=min(spent[1:]) / samples * recipe.batch * plan.updates,
        parameters=sum(p.numel() for p in weights),
    )


def _pass(state: State, images: Tensor, labels: Tensor) -> int:
    """Run one forward and backward; return the bytes saved between them."""
    storages: dict[int, int] = {}
    weights = {p.untyped_storage().data_ptr() for p in state.model.parameters()}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        autocast(state.plan.recipe, state.device),
    ):
        loss = F.cross_entropy(state.model(images), labels)
    loss.backward()
    return sum(storages.values())


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def data_bytes(info: Info) -> int:
    """Return the bytes of a data set that is kept on the device, one per value."""
    return (info.samples + info.test_samples) * prod(info.shape)
