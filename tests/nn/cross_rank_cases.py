"""The cases of test_cross_rank.py, run by torchrun on every rank.

Each compares a layer on this rank's shard with PyTorch's BatchNorm on the whole batch.
"""

from functools import partial

import torch
import torch.distributed as dist
from launch_ranks import Cases
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ghostbatch.nn import to_cross_rank

case = Cases()
SHARD = 6


def twins(kind, **options):
    """Return a layer over all ranks and PyTorch's, with the same random parameters."""
    torch.manual_seed(0)
    model, twin = (nn.Sequential(kind(3, **options)).double() for _ in range(2))
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        mine.data.copy_(torch.randn(3).double())
        theirs.data.copy_(mine.data)
    to_cross_rank(model)
    return model, twin


def without_bias(features):
    layer = nn.BatchNorm2d(features)
    layer.register_parameter("bias", None)
    return layer


def compare(kind, dims, tolerance=1e-10, **options):
    """Compare outputs, gradients and buffers over three updates with a random loss."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model, twin = twins(kind, **options)
    mine = slice(rank * SHARD, (rank + 1) * SHARD)
    for step in range(3):
        draw = torch.Generator().manual_seed(step)
        x, factors = torch.randn(2, world * SHARD, 3, *dims, generator=draw).double()
        x = 3 * x + 100
        whole, shard = (t.clone().requires_grad_() for t in (x, x[mine]))
        expected, found = twin(whole), model(shard)
        (expected * factors).sum().backward()
        (found * factors[mine]).sum().backward()
        close(found, expected[mine], "output", tolerance)
        close(shard.grad, whole.grad[mine], "input gradient", tolerance)
    for (name, mine_), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
        dist.all_reduce(mine_.grad)
        close(mine_.grad, theirs.grad, name, tolerance)
    for (name, buffer), theirs in zip(model.named_buffers(), twin.buffers(), strict=True):
        close(buffer, theirs, name, tolerance)
    close(model.eval()(x), twin.eval()(x), "evaluation", tolerance)


def close(found, expected, name, tolerance):
    assert found.dtype == expected.dtype, name
    torch.testing.assert_close(
        found, expected, rtol=tolerance, atol=tolerance, msg=lambda m: f"{name}: {m}"
    )


case.functions |= {
    "dense_inputs_agree": partial(compare, nn.BatchNorm1d, ()),
    "sequences_agree": partial(compare, nn.BatchNorm1d, (5,)),
    "images_agree": partial(compare, nn.BatchNorm2d, (4, 5)),
    "volumes_agree": partial(compare, nn.BatchNorm3d, (2, 3, 4)),
    "cumulative_statistics_agree": partial(compare, nn.BatchNorm2d, (4, 5), momentum=None),
    "momentum_and_eps_agree": partial(compare, nn.BatchNorm2d, (4, 5), momentum=0.7, eps=0.3),
    "a_layer_without_weights_agrees": partial(compare, nn.BatchNorm2d, (4, 5), affine=False),
    "a_layer_without_bias_agrees": partial(compare, without_bias, (4, 5)),
}


@case
def under_ddp_gradients_are_means_over_ranks():
    rank, world = dist.get_rank(), dist.get_world_size()
    model, twin = twins(nn.BatchNorm1d)
    parallel = DistributedDataParallel(model, broadcast_buffers=False)
    x = torch.randn(world * SHARD, 3, generator=torch.Generator().manual_seed(7)).double()
    parallel(x.chunk(world)[rank]).pow(3).mean().backward()
    twin(x).pow(3).mean().backward()
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        close(mine.grad, theirs.grad, "gradient", 1e-12)


@case
def bf16_is_normalised_in_fp32():
    model, twin = (net.float() for net in twins(nn.BatchNorm2d))
    x = torch.randn(dist.get_world_size() * SHARD, 3, 4, 4).bfloat16() + 1
    found = model(x.chunk(dist.get_world_size())[dist.get_rank()])
    expected = twin(x)
    assert found.dtype == expected.dtype == torch.bfloat16
    close(model[0].running_mean, twin[0].running_mean, "mean", 1e-5)
    close(model[0].running_var, twin[0].running_var, "variance", 1e-5)


if __name__ == "__main__":
    case.run()
