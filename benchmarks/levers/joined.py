"""Ghost norm whose result is used twice: its backward adds the two gradients while it reads them.

The output of a residual block goes to a convolution and to the next shortcut. Autograd would add
their two gradients in a kernel of its own: read two tensors, write one, which the norm then reads.
Here the norm returns two tensors that share their memory, one for each use, and gets a gradient for
each.

With a residual, the gradient that passes ReLU is a result anyway. The first step of the kernel, the
one that sums, stores it; the second reads it back from the cache, with x, instead of reading two
gradients and y once more. The kernel is otherwise that of the package, where it belongs if it pays.
"""

from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from ghostbatch.nn.norm import GhostBatchNorm
from ghostbatch.nn.parts import BasicBlock, ConvNormReLU
from ghostbatch.ops.backends.base import NormCall
from ghostbatch.ops.backends.layouts import as_dense_as, in_rows
from ghostbatch.ops.backends.triton.kernels import COUNTS, read_affine
from ghostbatch.ops.backends.triton.launch import TritonBackend, _launch, _multiprocessors
from ghostbatch.ops.backends.triton.primitives import (
    add_up,
    add_up_group,
    base_of,
    count_in,
    fetch,
    load,
    locate,
    next_ticket,
    publish_sums,
    relu_grad,
    rows_to_add,
    store,
    subtile,
    wait_for,
)
from ghostbatch.ops.backends.triton.tiling import Tuning, make_plan, tuning
from ghostbatch.ops.running.stats import RunningStats

BACKEND = TritonBackend()


@triton.jit
def keep_soon(ptr, at, values, keep, EVEN: tl.constexpr, STREAM: tl.constexpr):
    """Store values that are soon read again; return them as they were rounded, in fp32."""
    policy: tl.constexpr = "evict_last" if STREAM > 1 else ""
    rounded = values.to(ptr.dtype.element_ty)
    if EVEN:
        tl.store(ptr + at, rounded, eviction_policy=policy)
    else:
        tl.store(ptr + at, rounded, keep, eviction_policy=policy)
    return rounded.to(tl.float32)


@triton.jit
def read_back(ptr, at, keep, EVEN: tl.constexpr):
    """Load what other programs stored, from the L2 cache, where it can be seen, in fp32."""
    if EVEN:
        return tl.load(ptr + at, cache_modifier=".cg").to(tl.float32)
    else:  # noqa: RET505 (Triton keeps a branch that is not taken only here)
        return tl.load(ptr + at, keep, other=0.0, cache_modifier=".cg").to(tl.float32)


@triton.jit(do_not_specialize=COUNTS)
def backward_kernel(  # noqa: PLR0912, PLR0915 (as in the package)
    dy_ptr,  # (N, C, ...), in rows or in planes; so are the next five
    other_ptr,  # a second gradient of y, with JOINED
    x_ptr,
    y_ptr,
    dx_ptr,
    dresidual_ptr,
    weight_ptr,  # (C), as is the bias
    bias_ptr,
    statistics_ptr,  # (3, K, C): those of the forward
    sums_ptr,  # (2, K, C): of dy xhat, and of dy
    dparameters_ptr,  # (2, C): the gradients of weight and bias
    partial_sums_ptr,  # these two as in the forward
    counters_ptr,
    # The plan and the flags; with RESIDUAL, ReLU's mask is read from y, and masked dy stored by
    # the first step, so that the second reads it and x instead of all four.
    ghosts, aligned, ghost_rows, last_rows, tiles, last_tiles, blocks, delay, tickets_per_run,
    S: tl.constexpr, PLANES: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr, RELU: tl.constexpr, EVEN: tl.constexpr, U: tl.constexpr,
    R: tl.constexpr, BC: tl.constexpr, SUB: tl.constexpr, FAN: tl.constexpr, TREE: tl.constexpr,
    ALIGN: tl.constexpr, LOOP: tl.constexpr, STREAM: tl.constexpr, JOINED: tl.constexpr,
):  # fmt: skip
    """As the package's, with ``dy + other`` in the place of ``dy``."""
    C = aligned * ALIGN  # so that the compiler knows a divisor of it
    total = ((ghosts - 1) * tiles + last_tiles) * blocks
    most_tiles = tl.maximum(tiles, last_tiles)
    bundles = tl.cdiv(most_tiles, FAN) if TREE else 0
    column_C = tl.arange(0, BC)
    ticket, runs_before = next_ticket(counters_ptr, tickets_per_run)
    while ticket < total + delay:
        if ticket < total:
            group, ghost, channel, rows, tile, count = locate(
                ticket, ghosts, tiles, last_tiles, blocks, ghost_rows, last_rows, BC
            )
            channel_C, live_C = channel + column_C, channel + column_C < C
            place = ghost * C + channel_C
            mean_C, invstd_C, slope_C, bias_C = read_affine(
                statistics_ptr, place, ghosts * C, weight_ptr, bias_ptr, channel_C, live_C,
                WEIGHT, BIAS,
            )  # fmt: skip
            dot_RC = tl.zeros((R, BC), tl.float32)
            sum_RC = tl.zeros((R, BC), tl.float32)
            first = tile * (SUB * U * R)
            base = base_of(ghost, first, channel, ghost_rows, C, S, PLANES)
            for sub in range(SUB):
                at_RCU, keep_RCU = subtile(first, sub, rows, column_C, live_C, C, S, PLANES, U, R)
                x_RCU = load(x_ptr + base, at_RCU, keep_RCU, EVEN, True, STREAM)
                dy_RCU = load(dy_ptr + base, at_RCU, keep_RCU, EVEN, not RESIDUAL, STREAM)
                if JOINED:
                    dy_RCU += load(other_ptr + base, at_RCU, keep_RCU, EVEN, not RESIDUAL, STREAM)
                x_RCU -= mean_C[None, :, None]
                dy_RCU = relu_grad(
                    dy_RCU, x_RCU, y_ptr + base, at_RCU, keep_RCU, slope_C, bias_C,
                    EVEN, False, STREAM, RELU, RESIDUAL,
                )  # fmt: skip
                if RESIDUAL:
                    dy_RCU = keep_soon(dresidual_ptr + base, at_RCU, dy_RCU, keep_RCU, EVEN, STREAM)
                sum_RC += tl.sum(dy_RCU, 2)
                dot_RC += tl.sum(dy_RCU * x_RCU, 2)
            parts = partial_sums_ptr + group.to(tl.int64) * (most_tiles + bundles) * (2 * BC)
            counter = counters_ptr + 1 + group * (1 + bundles)
            dot_C, sum_C = tl.sum(dot_RC, 0), tl.sum(sum_RC, 0)
            if publish_sums(
                parts, counter, tile, count, most_tiles, dot_C, sum_C, column_C, runs_before,
                FAN, TREE,
            ):  # fmt: skip
                dot_C, sum_C = add_up_group(parts, count, most_tiles, column_C, live_C, FAN, TREE)
                tl.store(sums_ptr + place, dot_C * invstd_C, live_C)
                tl.store(sums_ptr + ghosts * C + place, sum_C, live_C)
                count_in(counter)
                block = group % blocks
                done = counters_ptr + 1 + ghosts * blocks * (1 + bundles) + block
                if count_in(done) == runs_before * ghosts + ghosts - 1:
                    dot_C, sum_C = add_up(
                        sums_ptr, sums_ptr + ghosts * C, ghosts, C, channel_C, live_C, FAN
                    )
                    tl.store(dparameters_ptr + channel_C, dot_C, live_C)
                    tl.store(dparameters_ptr + C + channel_C, sum_C, live_C)

        if ticket >= delay:
            group, ghost, channel, rows, tile, count = locate(
                ticket - delay, ghosts, tiles, last_tiles, blocks, ghost_rows, last_rows, BC
            )
            channel_C, live_C = channel + column_C, channel + column_C < C
            place = ghost * C + channel_C
            mean_C, invstd_C, slope_C, bias_C = read_affine(
                statistics_ptr, place, ghosts * C, weight_ptr, bias_ptr, channel_C, live_C,
                WEIGHT, BIAS,
            )  # fmt: skip
            first = tile * (SUB * U * R)
            base = base_of(ghost, first, channel, ghost_rows, C, S, PLANES)
            counter = counters_ptr + 1 + group * (1 + bundles)
            at_RCU, keep_RCU = subtile(first, 0, rows, column_C, live_C, C, S, PLANES, U, R)
            x_next = fetch(x_ptr + base, at_RCU, keep_RCU, EVEN, False, STREAM)
            if not RESIDUAL:
                dy_next = fetch(dy_ptr + base, at_RCU, keep_RCU, EVEN, False, STREAM)
                if JOINED:
                    other_next = fetch(other_ptr + base, at_RCU, keep_RCU, EVEN, False, STREAM)
            wait_for(counter, (runs_before + 1) * (rows_to_add(count, FAN, TREE) + 1))
            scale = 1.0 / rows.to(tl.float32)
            dot_C = tl.load(sums_ptr + place, live_C, other=0.0, cache_modifier=".cg")
            sum_C = tl.load(sums_ptr + ghosts * C + place, live_C, other=0.0, cache_modifier=".cg")
            tilt_C = -slope_C * invstd_C * dot_C * scale
            level_C = -slope_C * sum_C * scale
            for sub in tl.static_range(SUB):
                at_RCU, keep_RCU = subtile(first, sub, rows, column_C, live_C, C, S, PLANES, U, R)
                if sub > 0:
                    x_next = fetch(x_ptr + base, at_RCU, keep_RCU, EVEN, False, STREAM)
                    if not RESIDUAL:
                        dy_next = fetch(dy_ptr + base, at_RCU, keep_RCU, EVEN, False, STREAM)
                        if JOINED:
                            other_next = fetch(
                                other_ptr + base, at_RCU, keep_RCU, EVEN, False, STREAM
                            )
                if RESIDUAL:
                    dy_RCU = read_back(dresidual_ptr + base, at_RCU, keep_RCU, EVEN)
                    x_RCU = x_next.to(tl.float32) - mean_C[None, :, None]
                else:
                    x_RCU = x_next.to(tl.float32) - mean_C[None, :, None]
                    dy_RCU = dy_next.to(tl.float32)
                    if JOINED:
                        dy_RCU += other_next.to(tl.float32)
                    dy_RCU = relu_grad(
                        dy_RCU, x_RCU, y_ptr + base, at_RCU, keep_RCU, slope_C, bias_C,
                        EVEN, False, STREAM, RELU, False,
                    )  # fmt: skip
                dx_RCU = x_RCU * tilt_C[None, :, None] + level_C[None, :, None]
                dx_RCU += dy_RCU * slope_C[None, :, None]
                store(dx_ptr + base, at_RCU, dx_RCU, keep_RCU, EVEN, STREAM)

        ticket = next_ticket(counters_ptr, tickets_per_run)[0] if LOOP else total + delay


# ---------------------------------------------------------------------------------------- autograd


class JoinedNorm(torch.autograd.Function):
    """Ghost norm, residual and ReLU, returned twice; the input must be dense."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor | None, layer: GhostBatchNorm, *_: Any
    ) -> Any:
        """Return the result, and the same memory again."""
        BACKEND.prepare(x.device)
        call = NormCall(x, layer.weight, layer.bias, layer.ghost, layer.eps, "relu", residual)
        mean, var, tracked = layer.running_mean, layer.running_var, layer.num_batches_tracked
        running = None
        if mean is not None and var is not None:
            running = RunningStats(mean, var, tracked, layer.momentum, layer.running)
        y, statistics = BACKEND.forward(call, running)
        ctx.call = call._replace(x=None, residual=None)
        ctx.save_for_backward(x, statistics, None if residual is None else y)
        ctx.set_materialize_grads(False)
        return y, y.new_empty(0).set_(y)  # type: ignore[call-overload]

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, other: Tensor | None) -> Any:
        """Return the gradients of x, residual, weight and bias."""
        x, statistics, y = ctx.saved_tensors
        if dy is None:
            dy, other = other, None
        if dy is None:
            return None, None, None, None, None
        call = ctx.call._replace(x=x)
        dx, dresidual, parameters = backward(call, statistics, dy, other, y)
        return dx, dresidual, None, parameters[0], parameters[1]


def settings_for(call: NormCall, residual: bool) -> Tuning:
    """Return the settings: with a residual, eight vectors per thread do not fit its registers."""
    x = call.x
    chosen = tuning(tuple(x.shape), x.dtype, not in_rows(x), True, call.ghost)
    if residual and chosen.vectors > 4:
        return replace(chosen, vectors=4, subtiles=2 * chosen.subtiles, registers=128)
    return chosen


def backward(
    call: NormCall,
    statistics: Tensor,
    dy: Tensor,
    other: Tensor | None,
    y: Tensor | None,
    settings: Tuning | None = None,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return the gradients of x, of the residual if ``y`` is given, and of weight and bias."""
    x = call.x
    settings = settings or settings_for(call, y is not None)
    plan = make_plan(
        tuple(x.shape), x.dtype, not in_rows(x), call.ghost, settings, _multiprocessors(x.device)
    )
    dx = torch.empty_like(x)
    dresidual = None if y is None else torch.empty_like(x)
    dparameters = statistics.new_empty(2, x.shape[1])
    _launch(
        backward_kernel,
        plan,
        dy_ptr=as_dense_as(x, dy),
        other_ptr=x if other is None else as_dense_as(x, other),  # x in places that are not read
        x_ptr=x,
        y_ptr=x if y is None else y,
        dx_ptr=dx,
        dresidual_ptr=x if dresidual is None else dresidual,
        weight_ptr=call.weight,
        bias_ptr=call.bias,
        statistics_ptr=statistics,
        sums_ptr=torch.empty_like(statistics[:2]),
        dparameters_ptr=dparameters,
        WEIGHT=True,
        BIAS=True,
        RESIDUAL=y is not None,
        RELU=True,
        JOINED=other is not None,
    )
    return dx, dresidual, dparameters


def joined_norm(layer: GhostBatchNorm, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return ``relu(norm(x) + residual)`` twice, once for each of its two uses."""
    return JoinedNorm.apply(x, residual, layer, layer.weight, layer.bias)  # type: ignore[no-any-return, no-untyped-call]


# ------------------------------------------------------------------------------------------ layers


class JoinedStem(ConvNormReLU):
    """The first layer of a residual network, whose result two layers take."""

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Any:
        """Return the result twice."""
        return joined_norm(self.norm, self.pool(self.conv(x)), residual)  # type: ignore[arg-type]


class JoinedBlock(BasicBlock):
    """A residual block that takes its input twice; all but the last return their result twice."""

    last: bool

    def forward(self, x: Any) -> Any:
        """From two tensors to two, or to one at the end of the network."""
        left, right = x
        hidden, shortcut = self.first(left), self.shortcut(right)
        twice = joined_norm(self.second.norm, self.second.conv(hidden), shortcut)  # type: ignore[arg-type]
        return twice[0] if self.last else twice


def join_gradients(model: nn.Module) -> nn.Module:
    """Make the blocks of a residual network pass their result on twice; return the model."""
    blocks = [m for m in model.modules() if isinstance(m, BasicBlock)]
    if blocks:
        model.stem.__class__ = JoinedStem  # type: ignore[assignment]
    for block in blocks:
        block.__class__ = JoinedBlock
        block.last = block is blocks[-1]  # type: ignore[assignment]
    return model
