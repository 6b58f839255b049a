"""The cases of test_shared_statistics.py, run by torchrun on every rank.

Each trains a ghost model on this rank's contiguous shard, and its twin, which shares nothing, on
the whole batch. Weights and statistics must agree on every rank.
"""

import copy
import importlib
import pickle
import warnings
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from launch_ranks import Cases, count_calls, load
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import ghostbatch as gb
from ghostbatch.ops.running import channel
from ghostbatch.ops.running.pending import PENDING

case = Cases()
GHOST, SHARD = 8, 32


class Net(nn.Module):
    """Two blocks; the second may be run under activation checkpointing."""

    def __init__(self, reentrant=None, **norm):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Sequential(
            nn.Conv2d(2, 4, 3), gb.GhostBatchNorm2d(4, GHOST, **norm), nn.ReLU()
        )
        self.second = nn.Sequential(nn.Linear(16, 8), gb.GhostBatchNorm1d(8, GHOST, **norm))
        self.reentrant = reentrant
        self.double()

    def forward(self, x):
        x = self.first(x).flatten(1)
        if self.reentrant is None:
            return self.second(x)
        return checkpoint(self.second, x, use_reentrant=self.reentrant)


def batch(step, size):
    draw = torch.Generator().manual_seed(step)
    return torch.randn(size, 2, 4, 4, generator=draw, dtype=torch.float64)


def close(model, twin):
    for (name, mine), theirs in zip(
        model.state_dict().items(), twin.state_dict().values(), strict=True
    ):
        mine = mine.full_tensor() if isinstance(mine, DTensor) else mine  # noqa: PLW2901
        torch.testing.assert_close(
            mine, theirs, rtol=0, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}"
        )


def compare(*, micros=1, prepare=lambda net: net, wrap=DistributedDataParallel, **options):
    """Train on shards and on the whole batch; return the collectives per backward.

    The first steps are not counted: while what they exchange changes, ranks need one more.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    twin = prepare(Net(**{**options, "process_group": gb.LOCAL, "reentrant": None}))
    model = prepare(Net(**options))
    parallel = wrap(model)
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9) for net in (model, twin)]
    steps = 2
    for step in range(2 + steps):
        if step == 2:
            calls = count_calls(channel, "gather")
        whole = batch(step, SHARD * world)
        for optimizer in optimizers:
            optimizer.zero_grad()
        for micro, piece in enumerate(whole.chunk(micros)):
            shard = piece.chunk(world)[rank]
            with parallel.no_sync() if micro < micros - 1 else nullcontext():
                (parallel(shard).square().mean() / micros).backward()
        twin(whole).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
        close(model, twin)  # after every backward, on every rank
    return calls() / (steps * micros)


def frozen_first(net):
    for parameter in net.first.parameters():
        parameter.requires_grad_(False)
    return net


class Averaged(nn.Module):
    """Averages gradients as DDP does, which does not support reentrant checkpointing of a block."""

    def __init__(self, model):
        super().__init__()
        self.model = model
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(self.average)

    def average(self, parameter):
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()

    def forward(self, x):
        return self.model(x.requires_grad_())


def agrees(**options):
    assert compare(**options) == 1


case.functions |= {
    "gradients_weights_and_statistics_agree": agrees,
    "micro_batches_agree": partial(agrees, micros=2),
    "the_mean_policy_agrees": partial(agrees, running="mean"),
    "a_cumulative_average_agrees": partial(agrees, momentum=None),
    "a_frozen_first_block_agrees": partial(agrees, prepare=frozen_first),
    "checkpointing_agrees": partial(agrees, reentrant=False, wrap=Averaged),
    "reentrant_checkpointing_agrees": partial(agrees, reentrant=True, wrap=Averaged),
}


@case
def compiled_layers_agree_with_one_collective_each():
    wrap = lambda m: DistributedDataParallel(torch.compile(m, backend="aot_eager"))  # noqa: E731
    assert compare(wrap=wrap) == 2  # layer by layer


@case
def fsdp2_agrees():
    compare(wrap=fsdp)


def fsdp(model):
    fully_shard(model.first)
    return fully_shard(model)


@case
def ghosts_that_do_not_divide_are_warned_of():
    layer = gb.GhostBatchNorm1d(3, GHOST).double()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        layer(batch(0, GHOST + 2)[:, 0, 0, :3]).sum().backward()
    assert [str(w.message)[:38] for w in caught] == ["this rank's batch is not a multiple of"]


@case
def local_layers_share_nothing():
    model = gb.GhostBatchNorm1d(3, GHOST, process_group=gb.LOCAL).double()
    twin = copy.deepcopy(model)
    x = torch.full((GHOST, 3), float(dist.get_rank())).double() + batch(0, GHOST)[:, 0, 0, :3]
    calls = count_calls(channel, "gather")
    model(x).sum().backward()
    assert calls() == 0
    twin(x)
    close(model, twin)


@case
def forwards_without_backward_need_sync_statistics():
    model, twin = Net(), Net(process_group=gb.LOCAL)
    whole = batch(0, SHARD * dist.get_world_size())
    model(whole.chunk(dist.get_world_size())[dist.get_rank()])
    twin(whole)
    assert model.first[1].num_batches_tracked == 0
    gb.sync_statistics(model)
    close(model, twin)


@case
def uneven_shards_agree():
    """One ghost more on each rank than on the one before."""
    rank, world = dist.get_rank(), dist.get_world_size()
    sizes = [GHOST * (1 + r) for r in range(world)]
    model, twin = Net(), Net(process_group=gb.LOCAL)
    whole = batch(0, sum(sizes))
    model(whole.split(sizes)[rank]).square().mean().backward()
    twin(whole)
    close(model, twin)


@case
def a_backward_that_raises_does_not_stop_the_next():
    model, twin = Net(), Net(process_group=gb.LOCAL)
    whole = batch(0, SHARD * dist.get_world_size())
    shard = whole.chunk(dist.get_world_size())[dist.get_rank()]
    out = model(shard)
    model.first[0].weight.register_hook(fail := Failure())
    with suppress(ZeroDivisionError):
        out.sum().backward()
    fail.armed = False
    model(shard).sum().backward()
    twin(whole)
    twin(whole)
    close(model, twin)


class Failure:
    """A gradient hook that fails while it is armed."""

    armed = True

    def __call__(self, gradient):
        if self.armed:
            raise ZeroDivisionError
        return gradient


@case
def reading_never_communicates():
    model = Net()
    model(batch(0, SHARD)).sum().backward()
    if dist.get_rank() == 0:  # alone: a collective would hang here
        model.eval()(batch(1, 4))
        model.state_dict()
        copy.deepcopy(model)


@case
def a_layer_with_its_own_group_can_be_copied_and_pickled():
    mine = [dist.new_group([r]) for r in range(dist.get_world_size())][dist.get_rank()]
    layer = gb.GhostBatchNorm1d(3, GHOST, process_group=mine).double()
    twin = gb.GhostBatchNorm1d(3, GHOST, process_group=gb.LOCAL).double()
    x = batch(dist.get_rank(), GHOST)[:, 0, 0, :3]
    twin(x)
    for copied in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):  # noqa: S301
        calls = count_calls(channel, "gather")
        copied(x).sum().backward()
        assert calls() == 0
        close(copied, twin)


@case
def recalibration_averages_over_all_ranks_by_one_collective():
    rank, world = dist.get_rank(), dist.get_world_size()
    model, twin = Net(), Net(process_group=gb.LOCAL)
    batches = [batch(step, SHARD * world) for step in range(2)]
    calls = count_calls(importlib.import_module("ghostbatch.nn.recalibrate"), "gather")
    gb.recalibrate(DistributedDataParallel(model), [x.chunk(world)[rank] for x in batches])
    assert calls() == 1
    assert not PENDING
    close(model, gb.recalibrate(twin, batches))


case.functions.update(load(Path(__file__).with_name("unequal_ranks.py")).case.functions)


if __name__ == "__main__":
    case.run()
