"""Memory and time that a run would need here, measured on random images; nothing is written."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass, replace
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

from ghostbatch.data import Info, TensorFeed, is_folder
from ghostbatch.data.synthetic import synthetic
from ghostbatch.recipe import Plan
from ghostbatch.train.capture import WARM_UP, choose_update
from ghostbatch.train.device import check_threads, cudnn_choice, thread_count
from ghostbatch.train.evaluate import check_outputs, evaluate
from ghostbatch.train.explain import explain_faults
from ghostbatch.train.journal import schedule
from ghostbatch.train.ranks import Ranks
from ghostbatch.train.split import memory_remedy, split_batch
from ghostbatch.train.state import State, autocast, image_format, parameter_dtype, use_gpu_layers

PROBE = 32
"""Largest number of samples to measure the memory with."""

FIRST = 8
"""Samples of the first timed updates on a CPU."""

TIMED = 4
"""Number of timings, of which the least counts."""

PATIENCE = 0.5
"""Seconds after which no more than two timings are made. On a CPU, a batch is cut to fit."""

TOGETHER = 5
"""Updates of one timing on a GPU: the host prepares the next one while it computes."""

IMAGES = {"cpu": 128, "cuda": 8192}
"""Largest number of random images to time with; every batch is drawn from them."""

IMAGE_BYTES = 2**25
"""Largest number of bytes of these images."""


@dataclass(frozen=True)
class Pace:
    """How fast one run is on a device; the decoding of image files is not counted."""

    update: float
    """Seconds of an update of one batch."""
    evaluation: float
    """Seconds of an evaluation of the test set."""

    def seconds(self, plan: Plan, evaluations: int = 20) -> float:
        """Return the time of a run's updates and evaluations."""
        count = 1 + len(schedule(plan, evaluations)[1])
        return plan.length * self.update + count * self.evaluation


@dataclass(frozen=True)
class Estimate:
    """Memory that one rank needs, without the data set and the memory of libraries."""

    bytes: int
    """Weights, gradients, moments, initial weights, and the activations of a micro-batch; with
    ``Recipe.ema`` also the averaged weights."""
    parameters: int


def estimate(plan: Plan, info: Info, device: torch.device, micro: int | None = None) -> Estimate:
    """Run a few images forward and backward, and scale up to a micro-batch."""
    with _random_state_kept(device):
        state = State(plan, info, device)
        split = split_batch(plan.recipe, state.model, micro, world=1)
        check_outputs(state, split)
        samples = min(split.shard, PROBE)
        saved = _saved_bytes(state, info, samples)
    weights = [p for p in state.model.parameters() if p.requires_grad]
    copies = 3 + plan.recipe.optimizer.moments + (state.average is not None)
    fixed = copies * sum(p.numel() * p.element_size() for p in weights)
    return Estimate(
        bytes=fixed + round(saved / samples * split.shard),
        parameters=sum(p.numel() for p in weights),
    )


def measure_pace(
    plan: Plan,
    info: Info,
    device: torch.device,
    micro: int | None = None,
    threads: int | None = None,
    capture: bool = True,
) -> Pace:
    """Time updates and evaluations with the engine that the run would use; take the least.

    A GPU computes whole batches. A CPU may need minutes for one: it computes a part of the batch
    that fits into `PATIENCE`, and the result is in proportion to the samples.
    """
    check_threads(threads)
    batch = plan.recipe.batch
    with (
        _random_state_kept(device),
        cudnn_choice(deterministic=False),
        thread_count(threads or torch.get_num_threads()),
    ):
        if device.type == "cuda":
            with torch.cuda.device(device):
                pace = _time_run(plan, batch, info, device, micro, capture)
            torch.cuda.empty_cache()  # for the processes that run the cells of a study
            return pace
        samples = min(batch, FIRST)
        pace = _time_run(plan, samples, info, device)
        enough = min(batch, int(samples * PATIENCE / TIMED / pace.update))
        if enough > samples:
            samples, pace = enough, _time_run(plan, enough, info, device)
    return replace(pace, update=pace.update * batch / samples)


def _time_run(
    plan: Plan,
    batch: int,
    info: Info,
    device: torch.device,
    micro: int | None = None,
    capture: bool = True,
) -> Pace:
    """Return the pace of a run with another batch, on random images."""
    ghost = min(plan.recipe.ghost, batch) if plan.recipe.ghost else None
    sizes = {"batch": batch, "base_batch": batch, "ghost": ghost, "grow": None}
    recipe = replace(plan.recipe, **sizes, hold="epochs", reference=None)  # type: ignore[arg-type]
    state, ranks = State(replace(plan, recipe=recipe), info, device), Ranks()
    split = split_batch(recipe, state.model, micro, ranks.world)
    if device.type == "cuda":
        use_gpu_layers(state.model, recipe, one_rank=True)
    shape = "x".join(map(str, (*info.shape, info.classes)))
    data = synthetic(f"{shape}:{min(IMAGES[device.type], IMAGE_BYTES // prod(info.shape))}")
    feed = TensorFeed(
        data,
        batch=batch,
        seed=recipe.seed,
        augment=recipe.augment,
        device=device,
        **image_format(state.model, recipe, device),
    )
    kind = choose_update(state, feed, ranks, capture and not is_folder(recipe.data))
    problem = f"{split.shard} samples at a time do not fit into this device's memory"
    with (
        explain_faults("micro", problem, memory_remedy(split)),
        closing(kind(state, feed, split, ranks)) as update,
    ):
        pace = Pace(
            update=_least_seconds(update, device),
            evaluation=_least_seconds(
                lambda: evaluate(state.model, feed.test_batches(), autocast(recipe, device), ranks),
                device,
            ),
        )
    return replace(pace, evaluation=pace.evaluation * info.test_samples / len(data.test))


def _least_seconds(act: Callable[[], object], device: torch.device) -> float:
    """Return the least time of an action among several, after a warm-up."""
    on_gpu = device.type == "cuda"
    for _ in range(WARM_UP + 1 if on_gpu else 1):  # the last one captures the graph of an update
        act()
    spent: list[float] = []
    count = TOGETHER if on_gpu else 1
    while len(spent) < 2 or (len(spent) < TIMED and sum(spent) < PATIENCE):
        began = _now(device)
        for _ in range(count):
            act()
        spent.append((_now(device) - began) / count)
    return min(spent)


def _random_state_kept(device: torch.device) -> AbstractContextManager[None]:
    return torch.random.fork_rng(devices=[] if device.type == "cpu" else [device])


def _saved_bytes(state: State, info: Info, samples: int) -> int:
    """Run random images forward and backward; return the bytes saved between the two."""
    dtype = parameter_dtype(state.plan.recipe)
    images = torch.randn((samples, *info.shape), device=state.device, dtype=dtype)
    if state.device.type == "cuda":
        images = images.to(memory_format=torch.channels_last)
    labels = torch.randint(info.classes, (samples,), device=state.device)
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
