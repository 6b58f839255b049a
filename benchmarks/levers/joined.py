"""Ghost norm whose result is used twice: its backward adds the two gradients while it reads them.

The output of a residual block goes to a convolution and to the next shortcut. Autograd would add
their two gradients in a kernel of its own: read two tensors, write one, which the norm then reads.
Here the norm returns two tensors that share their memory, one for each use, and gets a gradient for
each. Saves two passes over the tensor of three.

The kernel is that of the package with a second pointer; if it pays, it belongs there.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from ghostbatch.nn.norm import GhostBatchNorm
from ghostbatch.nn.parts import BasicBlock, ConvNormReLU
from ghostbatch.ops import fused
from ghostbatch.ops.buffers import Buffers
from ghostbatch.ops.counters import make_store
from ghostbatch.ops.kernels import COUNTS
from ghostbatch.ops.layouts import as_dense_as
from ghostbatch.ops.tickets import (
    add_up,
    add_up_group,
    arrive,
    base_of,
    count_in,
    draw,
    fetch,
    load,
    locate,
    masked,
    offsets,
    parameter,
    rows_to_add,
    span,
    store,
    wait_for,
)
from ghostbatch.ops.tiling import Tuning


@triton.jit(do_not_specialize=COUNTS)
def backward_kernel(  # noqa: PLR0912, PLR0915 (as in the package)
    dy_ptr,
    other_ptr,  # a second gradient of y, added to the first
    x_ptr,
    y_ptr,
    dx_ptr,
    dresidual_ptr,
    weight_ptr,
    bias_ptr,
    table_ptr,  # of the forward
    sums_ptr,  # (2, K, C): of dy xhat, and of dy
    parameters_ptr,  # (2, C): the gradients of weight and bias
    parts_ptr,
    counters_ptr,  # tickets, then those of each group, then one for each block
    ghosts,
    aligned,
    ghost_rows,
    last_rows,
    tiles,
    last_tiles,
    blocks,
    delay,
    draws,
    S: tl.constexpr,
    PLANES: tl.constexpr,
    WEIGHT: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    RELU: tl.constexpr,
    EVEN: tl.constexpr,
    U: tl.constexpr,
    R: tl.constexpr,
    BC: tl.constexpr,
    SUB: tl.constexpr,
    FAN: tl.constexpr,
    TREE: tl.constexpr,
    ALIGN: tl.constexpr,
    LOOP: tl.constexpr,
    STREAM: tl.constexpr,
    JOINED: tl.constexpr,
):
    """As `ghostbatch.ops.kernels.backward_kernel`, with ``dy + other`` in the place of ``dy``."""
    C = aligned * ALIGN  # so that the compiler knows a divisor of it
    total = ((ghosts - 1) * tiles + last_tiles) * blocks
    most_tiles = tl.maximum(tiles, last_tiles)
    bundles = tl.cdiv(most_tiles, FAN) if TREE else 0
    column_C = tl.arange(0, BC)
    ticket, before = draw(counters_ptr, draws)
    while ticket < total + delay:
        if ticket < total:
            group, tile, count = locate(ticket, ghosts, tiles, last_tiles, blocks)
            ghost, channel = group // blocks, (group % blocks) * BC
            rows = tl.where(ghost == ghosts - 1, last_rows, ghost_rows)
            channel_C, live_C = channel + column_C, channel + column_C < C
            place = ghost * C + channel_C
            mean_C = tl.load(table_ptr + place, live_C, other=0.0)
            invstd_C = tl.load(table_ptr + ghosts * C + place, live_C, other=0.0)
            slope_C = parameter(weight_ptr, channel_C, live_C, 1.0, WEIGHT) * invstd_C
            bias_C = parameter(bias_ptr, channel_C, live_C, 0.0, BIAS)
            dot_RC = tl.zeros((R, BC), tl.float32)
            sum_RC = tl.zeros((R, BC), tl.float32)
            first = tile * (SUB * U * R)
            base = base_of(ghost, first, channel, ghost_rows, C, S, PLANES)
            for sub in range(SUB):
                row_R1U = first + sub * (U * R) + span(U, R)
                at_RCU = offsets(row_R1U, first, column_C, C, S, PLANES)
                keep_RCU = (row_R1U < rows) & live_C[None, :, None]
                x_RCU = load(x_ptr + base, at_RCU, keep_RCU, EVEN, True, STREAM)
                dy_RCU = load(dy_ptr + base, at_RCU, keep_RCU, EVEN, True, STREAM)
                if JOINED:
                    dy_RCU += load(other_ptr + base, at_RCU, keep_RCU, EVEN, True, STREAM)
                x_RCU -= mean_C[None, :, None]
                dy_RCU = masked(
                    dy_RCU, x_RCU, y_ptr + base, at_RCU, keep_RCU, slope_C, bias_C,
                    EVEN, True, STREAM, RELU, RESIDUAL,
                )  # fmt: skip
                sum_RC += tl.sum(dy_RCU, 2)
                dot_RC += tl.sum(dy_RCU * x_RCU, 2)
            parts = parts_ptr + group.to(tl.int64) * (most_tiles + bundles) * (2 * BC)
            counter = counters_ptr + 1 + group * (1 + bundles)
            dot_C, sum_C = tl.sum(dot_RC, 0), tl.sum(sum_RC, 0)
            if arrive(
                parts, counter, tile, count, most_tiles, dot_C, sum_C, column_C, before, FAN, TREE
            ):
                dot_C, sum_C = add_up_group(parts, count, most_tiles, column_C, live_C, FAN, TREE)
                tl.store(sums_ptr + place, dot_C * invstd_C, live_C)
                tl.store(sums_ptr + ghosts * C + place, sum_C, live_C)
                count_in(counter)
                block = group % blocks
                done = counters_ptr + 1 + ghosts * blocks * (1 + bundles) + block
                if count_in(done) == before * ghosts + ghosts - 1:
                    dot_C, sum_C = add_up(
                        sums_ptr, sums_ptr + ghosts * C, ghosts, C, channel_C, live_C, FAN
                    )
                    tl.store(parameters_ptr + channel_C, dot_C, live_C)
                    tl.store(parameters_ptr + C + channel_C, sum_C, live_C)

        if ticket >= delay:
            group, tile, count = locate(ticket - delay, ghosts, tiles, last_tiles, blocks)
            ghost, channel = group // blocks, (group % blocks) * BC
            rows = tl.where(ghost == ghosts - 1, last_rows, ghost_rows)
            channel_C, live_C = channel + column_C, channel + column_C < C
            place = ghost * C + channel_C
            mean_C = tl.load(table_ptr + place, live_C, other=0.0)
            invstd_C = tl.load(table_ptr + ghosts * C + place, live_C, other=0.0)
            slope_C = parameter(weight_ptr, channel_C, live_C, 1.0, WEIGHT) * invstd_C
            bias_C = parameter(bias_ptr, channel_C, live_C, 0.0, BIAS)
            first = tile * (SUB * U * R)
            base = base_of(ghost, first, channel, ghost_rows, C, S, PLANES)
            counter = counters_ptr + 1 + group * (1 + bundles)
            row_R1U = first + span(U, R)
            at_RCU = offsets(row_R1U, first, column_C, C, S, PLANES)
            keep_RCU = (row_R1U < rows) & live_C[None, :, None]
            x_next = fetch(x_ptr + base, at_RCU, keep_RCU, EVEN, False, STREAM)
            dy_next = fetch(dy_ptr + base, at_RCU, keep_RCU, EVEN, False, STREAM)
            if JOINED:
                other_next = fetch(other_ptr + base, at_RCU, keep_RCU, EVEN, False, STREAM)
            wait_for(counter, (before + 1) * (rows_to_add(count, FAN, TREE) + 1))
            scale = 1.0 / rows.to(tl.float32)
            dot_C = tl.load(sums_ptr + place, live_C, other=0.0, cache_modifier=".cg")
            sum_C = tl.load(sums_ptr + ghosts * C + place, live_C, other=0.0, cache_modifier=".cg")
            tilt_C = -slope_C * invstd_C * dot_C * scale
            level_C = -slope_C * sum_C * scale
            for sub in tl.static_range(SUB):
                row_R1U = first + sub * (U * R) + span(U, R)
                at_RCU = offsets(row_R1U, first, column_C, C, S, PLANES)
                keep_RCU = (row_R1U < rows) & live_C[None, :, None]
                if sub > 0:
                    x_next = fetch(x_ptr + base, at_RCU, keep_RCU, EVEN, False, STREAM)
                    dy_next = fetch(dy_ptr + base, at_RCU, keep_RCU, EVEN, False, STREAM)
                    if JOINED:
                        other_next = fetch(other_ptr + base, at_RCU, keep_RCU, EVEN, False, STREAM)
                x_RCU = x_next.to(tl.float32) - mean_C[None, :, None]
                dy_RCU = dy_next.to(tl.float32)
                if JOINED:
                    dy_RCU += other_next.to(tl.float32)
                dy_RCU = masked(
                    dy_RCU, x_RCU, y_ptr + base, at_RCU, keep_RCU, slope_C, bias_C,
                    EVEN, False, STREAM, RELU, RESIDUAL,
                )  # fmt: skip
                dx_RCU = x_RCU * tilt_C[None, :, None] + level_C[None, :, None]
                dx_RCU += dy_RCU * slope_C[None, :, None]
                store(dx_ptr + base, at_RCU, dx_RCU, keep_RCU, EVEN, STREAM)
                if RESIDUAL:
                    store(dresidual_ptr + base, at_RCU, dy_RCU, keep_RCU, EVEN, STREAM)

        ticket = draw(counters_ptr, draws)[0] if LOOP else total + delay


# ---------------------------------------------------------------------------------------- autograd


class JoinedNorm(torch.autograd.Function):
    """Ghost norm, residual and ReLU, returned twice; the input must be dense."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor | None, layer: GhostBatchNorm, *_: Any
    ) -> Any:
        """Return the result, and the same memory again."""
        make_store(x.device)
        mean, var, tracked = layer.running_mean, layer.running_var, layer.num_batches_tracked
        moving = None
        if mean is not None and var is not None:
            moving = Buffers(mean, var, tracked, layer.momentum, layer.running)
        y, table = fused.forward(
            x, layer.weight, layer.bias, layer.ghost, layer.eps, "relu", residual, moving
        )
        ctx.layer = layer
        ctx.save_for_backward(x, table, None if residual is None else y)
        ctx.set_materialize_grads(False)
        return y, y.new_empty(0).set_(y)  # type: ignore[call-overload]

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, other: Tensor | None) -> Any:
        """Return the gradients of x, residual, weight and bias."""
        x, table, y = ctx.saved_tensors
        if dy is None:
            dy, other = other, None
        if dy is None:
            return None, None, None, None, None
        dx, dresidual, parameters = backward(ctx.layer, dy, other, x, table, y)
        return dx, dresidual, None, parameters[0], parameters[1]


def backward(
    layer: GhostBatchNorm,
    dy: Tensor,
    other: Tensor | None,
    x: Tensor,
    table: Tensor,
    y: Tensor | None,
    settings: Tuning | None = None,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return the gradients of x, of the residual if ``y`` is given, and of weight and bias."""
    dy = as_dense_as(x, dy)
    other = None if other is None else as_dense_as(x, other)
    cut = fused.plan_for(x, layer.ghost, settings, backward=True)
    dx = torch.empty_like(x)
    dresidual = None if y is None else torch.empty_like(x)
    sums, parameters = torch.empty_like(table[:2]), table.new_empty(2, x.shape[1])
    parts, counters = fused._scratch(x, cut)
    missing = x  # never read
    fused._launch(
        backward_kernel,
        cut,
        *(dy, missing if other is None else other, x, missing if y is None else y, dx),
        *(missing if dresidual is None else dresidual, layer.weight, layer.bias),
        *(table, sums, parameters, parts, counters),
        WEIGHT=True,
        BIAS=True,
        RESIDUAL=y is not None,
        RELU=True,
        JOINED=other is not None,
    )
    return dx, dresidual, parameters


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
