"""What each rank does in test_ranks.py; started by torchrun, one process per rank, over gloo.

Every case trains a ghost model on this rank's contiguous shard, and its twin, which shares nothing,
on the whole batch; weights and statistics must agree on every rank.
"""

import copy
import pickle
import sys
import warnings
from contextlib import suppress

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import ghostbatch as gb
from ghostbatch.ops import ranks
from ghostbatch.train.ranks import leave

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
    """Train on shards and on the whole; return the collectives per backward for statistics."""
    rank, world = dist.get_rank(), dist.get_world_size()
    twin = prepare(Net(**{**options, "process_group": gb.LOCAL, "reentrant": None}))
    model = prepare(Net(**options))
    parallel = wrap(model)
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9) for net in (model, twin)]
    calls = count_collectives()
    steps = 3
    for step in range(steps):
        whole = batch(step, SHARD * world)
        for optimizer in optimizers:
            optimizer.zero_grad()
        for micro, piece in enumerate(whole.chunk(micros)):
            shard = piece.chunk(world)[rank]
            if micro < micros - 1:
                with parallel.no_sync():
                    (parallel(shard).square().mean() / micros).backward()
            else:
                (parallel(shard).square().mean() / micros).backward()
        twin(whole).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
        close(model, twin)  # after every backward, on every rank
    return calls() / (steps * micros)


def count_collectives():
    original, made = ranks.gather, []

    def counted(vector, group):
        made.append(vector.numel())
        return original(vector, group)

    from ghostbatch.ops import running  # noqa: PLC0415

    running.gather = counted

    def stop():
        running.gather = original
        return len(made)

    return stop


def frozen_first(net):
    for parameter in net.first.parameters():
        parameter.requires_grad_(False)
    return net


def case_plain():
    assert compare() == 1


def case_micro_batches():
    assert compare(micros=2) == 1


def case_mean_policy():
    assert compare(running="mean") == 1


def case_cumulative_average():
    assert compare(momentum=None) == 1


def case_frozen_first_block():
    assert compare(prepare=frozen_first) == 1


def case_checkpointing():
    for reentrant in (False, True):
        assert compare(reentrant=reentrant, wrap=Averaged) == 1


class Averaged(nn.Module):
    """What DDP does, by hand: reentrant checkpointing of a whole block suits DDP ill."""

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


def case_compiled():
    wrap = lambda m: DistributedDataParallel(torch.compile(m, backend="aot_eager"))  # noqa: E731
    assert compare(wrap=wrap) == 2  # layer by layer


def case_fsdp2():
    compare(wrap=fsdp)


def fsdp(model):
    fully_shard(model.first)
    return fully_shard(model)


def case_ghosts_that_do_not_divide_are_warned_of():
    layer = gb.GhostBatchNorm1d(3, GHOST).double()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        layer(batch(0, GHOST + 2)[:, 0, 0, :3]).sum().backward()
    assert [str(w.message)[:24] for w in caught] == ["this rank's 10 samples a"]


def case_local_layers_share_nothing():
    model = gb.GhostBatchNorm1d(3, GHOST, process_group=gb.LOCAL).double()
    twin = copy.deepcopy(model)
    x = torch.full((GHOST, 3), float(dist.get_rank())).double() + batch(0, GHOST)[:, 0, 0, :3]
    calls = count_collectives()
    model(x).sum().backward()
    assert calls() == 0
    twin(x)
    close(model, twin)


def case_no_gradient_needs_sync_statistics():
    model, twin = Net(), Net(process_group=gb.LOCAL)
    whole = batch(0, SHARD * dist.get_world_size())
    with torch.no_grad():
        model(whole.chunk(dist.get_world_size())[dist.get_rank()])
        twin(whole)
    assert model.first[1].num_batches_tracked == 0
    gb.sync_statistics(model)
    close(model, twin)


def case_uneven_shards():
    """One ghost more on each rank than on the one before."""
    rank, world = dist.get_rank(), dist.get_world_size()
    sizes = [GHOST * (1 + r) for r in range(world)]
    model, twin = Net(), Net(process_group=gb.LOCAL)
    whole = batch(0, sum(sizes))
    model(whole.split(sizes)[rank]).square().mean().backward()
    twin(whole)
    for mine, theirs in zip(model.buffers(), twin.buffers(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


def case_a_backward_that_raises_does_not_stop_the_next():
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
    for mine, theirs in zip(model.buffers(), twin.buffers(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


class Failure:
    """A gradient hook that fails while it is armed."""

    armed = True

    def __call__(self, gradient):
        if self.armed:
            raise ZeroDivisionError
        return gradient


def case_reading_never_communicates():
    model = Net()
    model(batch(0, SHARD)).sum().backward()
    if dist.get_rank() == 0:  # alone: a collective would hang here
        model.eval()(batch(1, 4))
        model.state_dict()
        copy.deepcopy(model)


def case_a_group_of_ones_own_survives_copies():
    mine = [dist.new_group([r]) for r in range(dist.get_world_size())][dist.get_rank()]
    layer = gb.GhostBatchNorm1d(3, GHOST, process_group=mine).double()
    twin = gb.GhostBatchNorm1d(3, GHOST, process_group=gb.LOCAL).double()
    x = batch(dist.get_rank(), GHOST)[:, 0, 0, :3]
    twin(x)
    for copied in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):  # noqa: S301
        calls = count_collectives()
        copied(x).sum().backward()
        assert calls() == 0
        close(copied, twin)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    for name, case in list(globals().items()):
        if name.startswith("case_") and name in (sys.argv[1:] or [name]):
            torch._dynamo.reset()
            case()
            dist.barrier()
            if dist.get_rank() == 0:
                print(name, "holds", flush=True)
    leave()
