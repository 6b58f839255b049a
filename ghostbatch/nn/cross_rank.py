"""Batch norm over the batch of all ranks, on any device.

PyTorch's SyncBatchNorm does the same but needs a GPU. Runs without ghosts use this one on several
ranks, so that their results do not depend on the number of ranks.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ghostbatch.ops.reference import per_channel


class CrossRankBatchNorm(_BatchNorm):
    """BatchNorm with statistics over the samples of all ranks, which must have equally many."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (nn.BatchNorm's name for it)
        """Normalise over all ranks in training, by the running statistics in evaluation."""
        if not self.training:
            return F.batch_norm(
                *(input, self.running_mean, self.running_var, self.weight, self.bias),
                training=self.running_mean is None,
                eps=self.eps,
            )
        wide = input.to(torch.promote_types(input.dtype, torch.float32))
        dims = [d for d in range(input.dim()) if d != 1]
        count = dist.get_world_size() * input.numel() // input.shape[1]
        mean = SumOverRanks.apply(wide.sum(dims)) / count  # type: ignore[no-untyped-call]
        centred = wide - per_channel(mean, input)
        squares = centred.square().sum(dims)
        variance = SumOverRanks.apply(squares) / count  # type: ignore[no-untyped-call]
        self._update_running(mean.detach(), variance.detach() * count / (count - 1))
        y = centred * per_channel(torch.rsqrt(variance + self.eps), input)
        if self.weight is not None:
            y = y * per_channel(self.weight, input)
        if self.bias is not None:
            y = y + per_channel(self.bias, input)
        return y.to(input.dtype)

    def _update_running(self, mean: Tensor, variance: Tensor) -> None:
        """Update the running statistics as nn.BatchNorm does."""
        if self.running_mean is None or self.running_var is None or not self.track_running_stats:
            return
        if self.num_batches_tracked is not None:
            self.num_batches_tracked += 1
        rate = self.momentum
        if rate is None:
            rate = 1 / float(self.num_batches_tracked)  # type: ignore[arg-type]
        for buffer, value in ((self.running_mean, mean), (self.running_var, variance)):
            buffer.mul_(1 - rate).add_(value.to(buffer.dtype), alpha=rate)


class SumOverRanks(torch.autograd.Function):
    """The sum of every rank's values, on every rank."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        """Return the sum."""
        del ctx
        total = values.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        """Sum the gradients: each rank's values enter every rank's sum."""
        return SumOverRanks.forward(ctx, gradients[0])


def to_cross_rank(model: nn.Module) -> None:
    """Make every plain BatchNorm of ``model`` normalise over all ranks, in place."""
    for layer in model.modules():
        if type(layer) in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d):
            layer.__class__ = CrossRankBatchNorm
