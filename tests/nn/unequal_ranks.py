"""Cases of test_shared_statistics.py in which ranks do not do the same."""

import copy
from datetime import timedelta
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from launch_ranks import Cases, count_calls
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import update_bn

import ghostbatch as gb
from ghostbatch.errors import RankError
from ghostbatch.ops.running import channel
from ghostbatch.ops.running.pending import PENDING

case = Cases()
GHOST = 4
OTHER_LAYERS = r"has run other layers than rank 0.*gb\.sync_statistics.*process_group=gb\.LOCAL$"


def norm(width=3, **options):
    return gb.GhostBatchNorm1d(width, GHOST, **options).double()


def net(**options):
    torch.manual_seed(0)
    layers = nn.Linear(3, 5), norm(5, **options), nn.Linear(5, 3), norm(**options)
    return nn.Sequential(*layers).double()


def twin_of(model):
    """A copy that shares nothing, for one rank that sees everything."""
    return gb.to_ghost(copy.deepcopy(model), GHOST, gb.LOCAL)


def batch(seed, size, width=3):
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(size, width, generator=draw).double() + 1


def train_on(model, x):
    model(x).square().sum().backward()


def same_statistics(model, twin):
    for mine, theirs in zip(model.buffers(), twin.buffers(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


def shards(seed=0, sizes=None):
    """The whole batch, and this rank's shard of it."""
    sizes = sizes or [2 * GHOST] * dist.get_world_size()
    whole = batch(seed, sum(sizes))
    return whole, whole.split(sizes)[dist.get_rank()]


# -------------------------------------------------------------------------- a mismatch is an error


@case
def other_layers_of_equal_width_are_refused_on_every_rank():
    layers = [norm() for _ in range(dist.get_world_size())]
    before = copy.deepcopy(layers)
    with pytest.raises(RankError, match=OTHER_LAYERS):
        train_on(layers[dist.get_rank()], batch(0, 8))
    for mine, theirs in zip(layers, before, strict=True):
        same_statistics(mine, theirs)
    train_on(layers[0], batch(0, 8))  # and the next exchange works


@case
def other_widths_are_refused_on_every_rank():
    width = 3 + dist.get_rank()
    with pytest.raises(RankError, match=f"this rank those of widths {width}.*{OTHER_LAYERS[-22:]}"):
        train_on(norm(width), batch(0, 8, width))


@case
def another_momentum_is_refused_on_every_rank():
    layer = norm()
    layer.momentum = 0.1 + dist.get_rank()
    with pytest.raises(RankError, match=OTHER_LAYERS):
        train_on(layer, batch(0, 8))


@case
def a_forward_more_on_one_rank_is_refused_on_every_rank():
    model = net()
    if dist.get_rank() == 1:
        model(batch(0, 8))
    with pytest.raises(RankError, match=OTHER_LAYERS):
        train_on(model, batch(0, 8))
    assert not PENDING


@case
def a_mismatch_on_gpus_is_refused_by_the_next_exchange():
    """Where the host does not wait for the headers; here on the CPU, with a GPU's events."""
    layers = [norm() for _ in range(dist.get_world_size())]
    train_on(layers[0], batch(0, 8))
    everybody = channel.open_channel(None, torch.device("cpu"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(everybody, "checks_later", True)
        patch.setattr(torch, "Event", lambda _: Mock())
        train_on(layers[0], batch(0, 8))
        train_on(layers[dist.get_rank()], batch(0, 8))
        with pytest.raises(RankError, match=OTHER_LAYERS):
            train_on(layers[0], batch(0, 8))


@case
def models_that_only_one_rank_has_built_are_no_mismatch():
    earlier = net()
    if dist.get_rank() == 0:
        net()
    later = net()
    if dist.get_rank() == 1:
        net(process_group=gb.LOCAL)
    for model in (earlier, later):
        train_on(model, batch(0, 8))


@case
def copies_of_a_layer_are_the_layer():
    model = net()
    twin = twin_of(model)
    whole, shard = shards()
    train_on(copied := copy.deepcopy(model) if dist.get_rank() else model, shard)
    twin(whole)
    same_statistics(copied, twin)


@case
def a_rank_that_never_comes_is_an_error_after_the_time_out():
    everybody = dist.new_group()
    layer = norm(process_group=everybody)
    train_on(layer, batch(0, 8))
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=0.2), everybody)
    if dist.get_rank() == 0:
        with pytest.raises(RankError, match=r"a rank did not take part.*Timed out.*gb\.LOCAL$"):
            train_on(layer, batch(0, 8))


@case
def join_is_refused_on_every_rank():
    ddp = DistributedDataParallel(net())
    with ddp.join(), pytest.raises(RankError, match=r"DDP's join.*process_group=gb\.LOCAL$"):
        ddp(batch(0, 8))


@case
def join_works_where_ranks_share_nothing():
    ddp = DistributedDataParallel(net(process_group=gb.LOCAL))
    with ddp.join():
        for step in range(1 + dist.get_rank()):
            train_on(ddp, batch(step, 8))


# ---------------------------------------------------------------------------------- an empty batch


def sizes_with_an_empty_rank():
    return [0 if rank == 1 else 2 * GHOST for rank in range(dist.get_world_size())]


@case
def a_rank_with_an_empty_batch_takes_part():
    for options in ({}, {"running": "mean"}, {"momentum": None}):
        model = net(**options)
        twin = twin_of(model)
        ddp = DistributedDataParallel(model)
        for step in range(3):
            whole, shard = shards(step, sizes_with_an_empty_rank())
            calls = count_calls(channel, "gather")
            train_on(ddp, shard)
            assert calls() <= 2
            train_on(twin, whole)
            same_statistics(model, twin)
        for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            whole_gradient = mine.grad * dist.get_world_size()  # DDP averages
            torch.testing.assert_close(whole_gradient, theirs.grad, rtol=0, atol=1e-9)


@case
def a_batch_that_is_empty_everywhere_changes_nothing():
    for options in ({}, {"running": "mean"}, {"momentum": None}):
        model = net(**options)
        before = copy.deepcopy(model)
        train_on(model, batch(0, 0))
        same_statistics(model, before)


# --------------------------------------------------------------------- forwards without a backward


@case
def update_bn_gives_each_rank_its_own_average_and_sync_statistics_that_of_all():
    """Also if ranks have unequally many batches."""
    model = net()
    everything, own = twin_of(model), twin_of(model)
    batches = [[batch(10 * r + n, 8) for n in range(1 + r)] for r in range(dist.get_world_size())]
    update_bn(batches[dist.get_rank()], model)
    update_bn(batches[dist.get_rank()], own)
    same_statistics(model, own)
    assert model[3].momentum == 0.1
    gb.sync_statistics(model)
    update_bn([x for some in batches for x in some], everything)
    same_statistics(model, everything)


@case
def update_bn_works_under_ddp_which_broadcasts_buffers():
    model = net()
    twin = twin_of(model)
    steps = [shards(seed) for seed in range(3)]
    update_bn([shard for _, shard in steps], DistributedDataParallel(model))
    assert model[3].running_mean.abs().sum() > 0
    gb.sync_statistics(model)
    update_bn([whole for whole, _ in steps], twin)
    same_statistics(model, twin)


@case
def training_after_update_bn_needs_no_sync_statistics():
    model = net()
    twin = twin_of(model)
    whole, shard = shards()
    for _ in range(2):  # the second resets what the first has left
        update_bn([shard] * (1 + dist.get_rank()), model)
    update_bn([w for r, w in enumerate(whole.split(8)) for _ in range(1 + r)], twin)
    train_on(model, shard)
    train_on(twin, whole)
    same_statistics(model, twin)


@case
def forwards_without_gradients_count_in_order_with_the_next_backward():
    for without_gradients in (torch.no_grad, torch.inference_mode):
        model = net()
        twin = twin_of(model)
        x, y, z = (shards(seed) for seed in range(3))
        loss = model(x[1]).sum()
        with without_gradients():
            model(y[1])
        loss.backward()
        train_on(model, z[1])
        for whole, _ in (x, y, z):
            twin(whole)
        same_statistics(model, twin)


@case
def sync_statistics_allows_unequally_many_forwards():
    for options in ({}, {"running": "mean"}):
        model = net(**options)
        twin = twin_of(model)
        if dist.get_rank() == 1:
            model(batch(0, 8))
            with torch.no_grad():
                model(batch(1, 8))
        gb.sync_statistics(model)
        for seed in range(2):
            twin(batch(seed, 8))
        same_statistics(model, twin)
        gb.sync_statistics(model)
        same_statistics(model, twin)


@case
def loaded_statistics_stay():
    model = net()
    saved = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        model(batch(dist.get_rank(), 8))
    model.load_state_dict(saved)
    gb.sync_statistics(model)
    assert all(mine.equal(saved[name]) for name, mine in model.state_dict().items())


@case
def recalibrated_statistics_stay():
    model = net()
    with torch.no_grad():
        model(batch(dist.get_rank(), 8))
    gb.recalibrate(model, [shards(seed)[1] for seed in range(2)])
    recalibrated = copy.deepcopy(model)
    gb.sync_statistics(model)
    same_statistics(model, recalibrated)


@case
def two_models_in_turn_take_one_collective_per_backward():
    models = net(), norm()
    for step in range(4):
        calls = count_calls(channel, "gather")
        for model in models:
            train_on(model, batch(0, 8))
        assert calls() == 2 or step < 2
