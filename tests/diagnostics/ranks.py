"""The cases of test_ranks.py, run by torchrun on every rank.

Those of the distance move the weights of a model that is spread over the ranks, and of its twin,
which is whole on every rank. Those of the noise scale compare with one process that has all data.
"""

from tempfile import TemporaryDirectory

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from launch_ranks import Cases, count_calls
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import ghostbatch as gb
from ghostbatch.diagnostics import distance

case = Cases()


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3)).double()


def sharded(**options):
    model = network()
    fully_shard(model[0], **options)
    return fully_shard(model, **options)


@torch.no_grad()
def walk(model, seed=1):
    """Move every parameter by the same amounts, however it is spread."""
    draw = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        step = torch.randn(parameter.shape, generator=draw, dtype=torch.float64)
        if isinstance(parameter, DTensor):
            step = torch.distributed.tensor.distribute_tensor(
                step, parameter.device_mesh, parameter.placements
            )
        parameter.add_(step)


def same(mine, whole, rel=1e-12):
    assert mine.layers.keys() == whole.layers.keys()
    found = torch.tensor([mine.total, *mine.layers.values()])
    expected = torch.tensor([whole.total, *whole.layers.values()])
    torch.testing.assert_close(found, expected, rtol=rel, atol=0)


def twins(model, **options):
    whole = network()
    pair = [gb.WeightDistance(each, **options) for each in (model, whole)]
    walk(model)
    walk(whole)
    return pair


@case
def shards_measure_the_whole_distance_by_one_collective():
    for keep in ("exact", "cpu", "bf16"):
        mine, whole = twins(sharded(), keep=keep)
        calls = count_calls(dist, "all_reduce")
        found = mine.distance()
        assert calls() == 1
        same(found, whole.distance())


@case
def replicas_of_shards_are_counted_once():
    half = dist.get_world_size() // 2
    mesh = init_device_mesh("cpu", (2, half), mesh_dim_names=("replicate", "shard"))
    mine, whole = twins(sharded(mesh=mesh))
    same(mine.distance(), whole.distance())


@case
def ddp_needs_no_collective_and_has_the_models_own_names():
    model = network()
    mine, whole = twins(DistributedDataParallel(model))
    calls = count_calls(dist, "all_reduce")
    same(mine.distance(), whole.distance())
    assert calls() == 0
    assert set(mine.distance().layers) == set(dict(model.named_parameters()))


@case
def choices_of_parameters_agree():
    mine, whole = twins(sharded(), norms=False, biases=False)
    same(mine.distance(), whole.distance())
    assert set(mine.distance().layers) == {"0.weight", "2.weight"}


@case
def a_sharded_start_survives_a_distributed_checkpoint():
    for keep in ("exact", "bf16"):
        with TemporaryDirectory() as folder:
            box = [folder]
            dist.broadcast_object_list(box)  # all ranks use that of the first one
            model = sharded()
            mine = gb.WeightDistance(model, keep=keep)
            dcp.save(mine.state_dict(), checkpoint_id=box[0])
            walk(model)
            resumed = gb.WeightDistance(model, keep=keep)
            state = resumed.state_dict()
            dcp.load(state, checkpoint_id=box[0])
            resumed.load_state_dict(state)
            dist.barrier()  # until every rank has read it
        assert resumed.distance() == mine.distance()


@case
def a_start_from_one_rank_serves_shards_and_back():
    mine, whole = twins(sharded())
    expected = whole.distance()
    saved, saved_whole = mine.state_dict(), whole.state_dict()
    mine.load_state_dict(saved_whole)
    same(mine.distance(), expected)
    whole.load_state_dict(saved)
    same(whole.distance(), expected)


@case
def a_pass_in_chunks_still_makes_one_collective():
    usual, distance.CHUNK = distance.CHUNK, 8
    mine, whole = twins(sharded())
    calls = count_calls(dist, "all_reduce")
    same(mine.distance(), whole.distance())
    assert calls() == 1
    distance.CHUNK = usual


def micro_batches(rank):
    """Return the micro-batches of a rank; the last rank has one more."""
    draw = torch.Generator().manual_seed(rank)
    last = rank == dist.get_world_size() - 1
    return torch.randn(2 + last, 4, 5, generator=draw, dtype=torch.float64).unbind()


def noise_of_one_process():
    """Return what a process measures that has the micro-batches of all ranks."""
    model, ranks = plain_network(), range(dist.get_world_size())
    scale = gb.GradientNoiseScale(model, process_group=gb.LOCAL)
    parts = [x for rank in ranks for x in micro_batches(rank)]
    for _ in range(2):
        scale.update([gradients(model, x) for x in parts], samples=4)
    return scale.estimate()


def plain_network():
    return network()[:1].append(nn.Linear(7, 3).double().requires_grad_(False))


def gradients(model, x):
    weights = [p for p in model.parameters() if p.requires_grad]
    return torch.autograd.grad(model(x).square().mean(), weights)


def same_noise(found, expected):
    """Compare estimates; those of all ranks are the same to the bit."""
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, vars(found))
    assert all(each == everyone[0] for each in everyone)
    for name in ("value", "updates", "signal", "noise"):
        assert abs(getattr(found, name) / getattr(expected, name) - 1) < 1e-10, name


@case
def noise_of_gradients_that_a_loop_averages_is_that_of_one_process():
    model, world = plain_network(), dist.get_world_size()
    scale = gb.GradientNoiseScale(model)
    for _ in range(2):
        model.zero_grad()
        for x in micro_batches(dist.get_rank()):
            (world / (2 * world + 1) * model(x).square().mean()).backward()
            scale.part(len(x))
        for p in model[0].parameters():
            dist.all_reduce(p.grad)
            p.grad /= world
        scale.update()
    same_noise(scale.estimate(), noise_of_one_process())


@case
def noise_of_gradients_that_ddp_averages_is_that_of_one_process():
    for view in (False, True):
        model = DistributedDataParallel(plain_network(), gradient_as_bucket_view=view)
        scale, world = gb.GradientNoiseScale(model), dist.get_world_size()
        for _ in range(2):
            model.zero_grad()
            *first, last = micro_batches(dist.get_rank())
            for x in first:
                with model.no_sync():
                    (world / (2 * world + 1) * model(x).square().mean()).backward()
                scale.part(len(x))
            (world / (2 * world + 1) * model(last).square().mean()).backward()
            scale.part(len(last))
            scale.update()
        same_noise(scale.estimate(), noise_of_one_process())


@case
def noise_of_given_gradients_is_that_of_one_process():
    model = plain_network()
    scale = gb.GradientNoiseScale(model)
    for _ in range(2):
        scale.update([gradients(model, x) for x in micro_batches(dist.get_rank())], samples=4)
    same_noise(scale.estimate(), noise_of_one_process())


@case
def noise_of_sharded_gradients_is_refused():
    with pytest.raises(gb.InputError, match=r"^model: its gradients are sharded"):
        gb.GradientNoiseScale(sharded())


if __name__ == "__main__":
    case.run()
