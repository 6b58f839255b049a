"""Kernels for weights in one buffer: collect gradients, judge the update, step, place.

Shapes: B values of a program. `ghostbatch.nn.FlatWeights` holds the buffers.
"""

import triton
import triton.language as tl


@triton.jit
def collect_kernel(
    leaf_grads_ptr,  # (leaves,): gradients of what the network reads
    targets_ptr,  # (COPIES, weights): the leaves that are copies of each weight; -1 if no more
    grads_ptr,  # (weights,)
    partials_ptr,  # (programs,): sums of squares
    weights,
    COPIES: tl.constexpr,
    B: tl.constexpr,
):
    """Write the gradient of each weight, the sum over its copies; and sums of their squares."""
    at_B = tl.program_id(0) * B + tl.arange(0, B)
    keep_B = at_B < weights
    grad_B = tl.zeros((B,), tl.float32)
    for copy in tl.static_range(COPIES):
        target_B = tl.load(targets_ptr + copy * weights + at_B, keep_B, other=-1)
        grad_B += tl.load(leaf_grads_ptr + target_B, target_B >= 0, other=0.0)
    tl.store(grads_ptr + at_B, grad_B, keep_B)
    tl.store(partials_ptr + tl.program_id(0), tl.sum(grad_B * grad_B))


@triton.jit
def judge_kernel(
    sums_ptr,  # (3,) float64: loss, correct answers, requests to stop
    partials_ptr,  # (programs,): sums of squares of the gradient
    norm_ptr,  # float64
    numbers_ptr,  # (11,) float64: see `ghostbatch.train.monitor`
    diverged_ptr,  # fp32
    programs,
    batch,
    clip,  # largest norm that is not clipped
    far,  # a loss above this multiple of the first one is far
    patience,  # consecutive updates with such a loss that count as divergence
    B: tl.constexpr,
):
    """Write the gradient's norm, and do what `Monitor.add` does."""
    squares_B = tl.zeros((B,), tl.float64)
    for start in range(0, programs, B):
        part_B = start + tl.arange(0, B)
        squares_B += tl.load(partials_ptr + part_B, part_B < programs, other=0.0).to(tl.float64)
    norm = tl.sqrt(tl.sum(squares_B))
    tl.store(norm_ptr, norm)
    loss = tl.load(sums_ptr) / batch
    accuracy = 100 * tl.load(sums_ptr + 1) / batch
    first = tl.load(numbers_ptr + 5)
    above = tl.load(numbers_ptr + 6)
    live = tl.load(diverged_ptr) == 0
    finite = (tl.abs(loss) < float("inf")) & (norm < float("inf"))
    if (first != first) & finite:  # noqa: PLR0124 (NaN: there is none yet)
        first = loss
    if live:
        tl.store(numbers_ptr, tl.load(numbers_ptr) + loss)
        tl.store(numbers_ptr + 1, tl.load(numbers_ptr + 1) + accuracy)
        tl.store(numbers_ptr + 2, tl.load(numbers_ptr + 2) + norm)
        tl.store(numbers_ptr + 3, tl.load(numbers_ptr + 3) + tl.where(norm > clip, 1.0, 0.0))
        tl.store(numbers_ptr + 4, tl.load(numbers_ptr + 4) + 1.0)
        above = tl.where(loss > far * first, above + 1, 0.0)
        tl.store(numbers_ptr + 7, loss)
        tl.store(numbers_ptr + 8, norm)
    diverged = tl.where(live & finite & (above < patience), 0.0, 1.0)
    tl.store(numbers_ptr + 5, first)
    tl.store(numbers_ptr + 6, above)
    tl.store(numbers_ptr + 9, tl.load(numbers_ptr + 9) + diverged)
    tl.store(numbers_ptr + 10, tl.load(numbers_ptr + 10) + tl.load(sums_ptr + 2))
    tl.store(diverged_ptr, diverged)


@triton.jit
def step_kernel(
    weights_ptr,  # (weights,), as the next two
    momentum_ptr,
    grads_ptr,
    norm_ptr,  # of the gradient, float64
    lr_ptr,
    skip_ptr,  # nothing changes unless it is 0
    weights,
    decayed,  # number of the weights that decay; they come first
    clip,  # largest norm
    momentum,
    decay,
    NESTEROV: tl.constexpr,
    B: tl.constexpr,
):
    """Clip the gradients by their norm and do one step of SGD with momentum."""
    if tl.load(skip_ptr) == 0:
        at_B = tl.program_id(0) * B + tl.arange(0, B)
        keep_B = at_B < weights
        weight_B = tl.load(weights_ptr + at_B, keep_B, other=0.0)
        velocity_B = tl.load(momentum_ptr + at_B, keep_B, other=0.0)
        grad_B = tl.load(grads_ptr + at_B, keep_B, other=0.0)
        norm = tl.load(norm_ptr).to(tl.float32)
        decay_B = tl.where(at_B < decayed, decay, 0.0)
        grad_B = grad_B * tl.minimum(clip / (norm + 1e-6), 1.0) + decay_B * weight_B
        velocity_B = momentum * velocity_B + grad_B
        step_B = grad_B + momentum * velocity_B if NESTEROV else velocity_B
        tl.store(momentum_ptr + at_B, velocity_B, keep_B)
        tl.store(weights_ptr + at_B, weight_B - tl.load(lr_ptr) * step_B, keep_B)


@triton.jit
def place_kernel(
    weights_ptr,  # (weights,)
    sources_ptr,  # (leaves,): the weight that each leaf is a copy of; -1 is zero
    leaves_ptr,  # (leaves,)
    leaves,
    B: tl.constexpr,
):
    """Write what the network reads: copies of the weights, and zeros."""
    at_B = tl.program_id(0) * B + tl.arange(0, B)
    keep_B = at_B < leaves
    source_B = tl.load(sources_ptr + at_B, keep_B, other=-1)
    weight_B = tl.load(weights_ptr + source_B, source_B >= 0, other=0.0)
    tl.store(leaves_ptr + at_B, weight_B.to(leaves_ptr.dtype.element_ty), keep_B)
