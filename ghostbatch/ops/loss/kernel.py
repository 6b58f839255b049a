"""The loss kernel: losses, correct answers and the gradient of the outputs in one pass.

PyTorch takes about fourteen kernels for them, which matters where an update is short. Shapes:
R samples of a program, C classes.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ghostbatch.ops.backends.base import on_device

TILE = 4096
"""Outputs of a program."""


@triton.jit
def loss_kernel(
    outputs_ptr,  # (N, C)
    labels_ptr,  # (N,)
    weights_ptr,  # (N,), or anything if not WEIGHTED
    grad_ptr,  # (N, C) fp32: of the sum of the weighted losses
    partials_ptr,  # (3, programs): sums of weighted losses, of losses and of correct answers
    N,
    C,
    smoothing,  # of the labels, for the weighted losses alone
    WEIGHTED: tl.constexpr,
    SMOOTHED: tl.constexpr,
    R: tl.constexpr,
    BC: tl.constexpr,
):
    """Write the gradients of R samples, and the sums over them."""
    row_R1 = tl.program_id(0) * R + tl.arange(0, R)[:, None]
    class_1C = tl.arange(0, BC)[None, :]
    there_R1 = row_R1 < N
    keep_RC = there_R1 & (class_1C < C)
    at_RC = row_R1.to(tl.int64) * C + class_1C
    x_RC = tl.load(outputs_ptr + at_RC, keep_RC, other=float("-inf")).to(tl.float32)
    x_RC = tl.where(there_R1, x_RC, tl.where(class_1C == 0, 0.0, float("-inf")))
    label_R1 = tl.load(labels_ptr + row_R1, there_R1, other=0).to(tl.int32)
    largest_R1 = tl.max(x_RC, 1, keep_dims=True)
    e_RC = tl.exp(x_RC - largest_R1)
    sum_R1 = tl.sum(e_RC, 1, keep_dims=True)
    is_label_RC = class_1C == label_R1
    own_R1 = tl.sum(tl.where(is_label_RC, x_RC, 0.0), 1, keep_dims=True)
    loss_R1 = tl.where(there_R1, tl.log(sum_R1) + largest_R1 - own_R1, 0.0)
    # The first of equal outputs is the answer, as in argmax.
    answer_R1 = tl.min(tl.where(x_RC == largest_R1, class_1C, BC), 1, keep_dims=True)
    correct_R1 = tl.where(there_R1 & (answer_R1 == label_R1), 1.0, 0.0)
    weighted_R1 = loss_R1
    if SMOOTHED:
        all_R1 = tl.sum(tl.where(class_1C < C, x_RC, 0.0), 1, keep_dims=True)
        weighted_R1 += tl.where(there_R1, smoothing * (own_R1 - all_R1 / C), 0.0)
        grad_RC = e_RC / sum_R1 - tl.where(is_label_RC, 1.0 - smoothing, 0.0) - smoothing / C
    else:
        grad_RC = e_RC / sum_R1 - tl.where(is_label_RC, 1.0, 0.0)
    if WEIGHTED:
        weight_R1 = tl.load(weights_ptr + row_R1, there_R1, other=0.0).to(tl.float32)
        grad_RC *= weight_R1
        weighted_R1 *= weight_R1
    tl.store(grad_ptr + at_RC, grad_RC, keep_RC)
    here_ptr = partials_ptr + tl.program_id(0)
    programs = tl.num_programs(0)
    tl.store(here_ptr, tl.sum(weighted_R1))
    tl.store(here_ptr + programs, tl.sum(loss_R1))
    tl.store(here_ptr + 2 * programs, tl.sum(correct_R1))


class SummedCrossEntropy(torch.autograd.Function):
    """`summed_cross_entropy` by the kernel; the gradient is computed in the forward."""

    @staticmethod
    def forward(
        ctx: Any, outputs: Tensor, labels: Tensor, weights: Tensor | None, smoothing: float
    ) -> tuple[Tensor, Tensor]:
        """Return the weighted sum, and the sums of losses and correct answers."""
        N, C = outputs.shape
        outputs = outputs.contiguous()
        width = triton.next_power_of_2(C)
        rows = max(1, min(32, TILE // width))
        programs = triton.cdiv(N, rows)
        grad = torch.empty_like(outputs, dtype=torch.float32)
        partials = torch.empty(3, programs, device=outputs.device)
        with on_device(outputs.device):
            loss_kernel[(programs,)](
                *(outputs, labels, labels if weights is None else weights, grad, partials, N, C),
                smoothing,
                WEIGHTED=weights is not None,
                SMOOTHED=smoothing != 0,
                R=rows,
                BC=width,
            )
        ctx.save_for_backward(grad)
        ctx.dtype = outputs.dtype
        weighted, *sums = partials.sum(1, dtype=torch.float64).split([1, 2])
        ctx.mark_non_differentiable(*sums)
        return weighted.float().squeeze(0), *sums

    @staticmethod
    def backward(ctx: Any, scale: Tensor, _: Tensor) -> tuple[Tensor, None, None, None]:
        """Return the gradient of the outputs."""
        (grad,) = ctx.saved_tensors
        return (grad * scale).to(ctx.dtype), None, None, None
