"""Cross entropy, accuracy and the gradient of the outputs in two small kernels.

PyTorch takes about fourteen kernels for them, which matters where an update is short.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 32


@triton.jit
def loss_kernel(
    outputs_ptr,  # (N, C)
    labels_ptr,  # (N,)
    grad_ptr,  # (N, C): of the mean loss
    partials_ptr,  # (2, programs): sums of loss and of right answers
    N,
    C: tl.constexpr,
    R: tl.constexpr,
    BC: tl.constexpr,
):
    """Write the gradient of some rows, and the sums over them."""
    row_R1 = tl.program_id(0) * R + tl.arange(0, R)[:, None]
    class_1C = tl.arange(0, BC)[None, :]
    keep_RC = (row_R1 < N) & (class_1C < C)
    at_RC = row_R1 * C + class_1C
    x_RC = tl.load(outputs_ptr + at_RC, keep_RC, other=float("-inf")).to(tl.float32)
    label_R1 = tl.load(labels_ptr + row_R1, row_R1 < N, other=0).to(tl.int32)
    x_RC = tl.where(row_R1 < N, x_RC, tl.where(class_1C == 0, 0.0, float("-inf")))
    most_R1 = tl.max(x_RC, 1, keep_dims=True)
    e_RC = tl.exp(x_RC - most_R1)
    sum_R1 = tl.sum(e_RC, 1, keep_dims=True)
    true_RC = class_1C == label_R1
    x_R1 = tl.sum(tl.where(true_RC, x_RC, 0.0), 1, keep_dims=True)
    loss_R1 = tl.log(sum_R1) + most_R1 - x_R1
    first_R1 = tl.min(tl.where(x_RC == most_R1, class_1C, BC), 1, keep_dims=True)  # as argmax
    right_R1 = (first_R1 == label_R1) & (row_R1 < N)
    grad_RC = (e_RC / sum_R1 - tl.where(true_RC, 1.0, 0.0)) / N
    tl.store(grad_ptr + at_RC, grad_RC.to(grad_ptr.dtype.element_ty), keep_RC)
    programs = tl.num_programs(0)
    here = partials_ptr + tl.program_id(0)
    tl.store(here, tl.sum(tl.where(row_R1 < N, loss_R1, 0.0)))
    tl.store(here + programs, tl.sum(tl.where(right_R1, 1.0, 0.0)))


@triton.jit
def means_kernel(partials_ptr, loss_ptr, sums_ptr, programs, N, CHUNK: tl.constexpr):
    """Write the mean loss; add it and the accuracy to the sums."""
    loss = tl.zeros((CHUNK,), tl.float32)
    right = tl.zeros((CHUNK,), tl.float32)
    for first in range(0, programs, CHUNK):
        part = first + tl.arange(0, CHUNK)
        loss += tl.load(partials_ptr + part, part < programs, other=0.0)
        right += tl.load(partials_ptr + programs + part, part < programs, other=0.0)
    mean = tl.sum(loss) / N
    tl.store(loss_ptr, mean)
    tl.store(sums_ptr, tl.load(sums_ptr) + mean)
    tl.store(sums_ptr + 1, tl.load(sums_ptr + 1) + tl.sum(right) / N)


def cross_entropy(outputs: Tensor, labels: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean loss and the gradient of the outputs; add loss and accuracy to ``sums``."""
    N, C = outputs.shape
    outputs = outputs.detach().contiguous()
    programs = triton.cdiv(N, ROWS)
    grad = torch.empty_like(outputs)
    partials = torch.empty(2, programs, device=outputs.device)
    loss = torch.empty((), device=outputs.device)
    loss_kernel[(programs,)](
        outputs, labels, grad, partials, N, C=C, R=ROWS, BC=triton.next_power_of_2(C)
    )
    means_kernel[(1,)](partials, loss, sums, programs, N, CHUNK=128)
    return loss, grad
