"""The Triton kernels of ghost norm: statistics now, normalisation a ghost behind.

The batch is cut into tiles, in the order of the ghosts. A program draws a ticket, t, and
    1. sums up tile t, leaves the sums in memory and counts itself in; the last to do so for a group
       (the tiles that share statistics) adds the sums up, always in the same order;
    2. normalises tile t - delay, which is still in the L2 cache, once its group is complete.
The delay is at least a group, so whatever 2 waits for was drawn earlier, by a program that runs and
whose step 1 waits for nothing: any number of resident programs, down to one, makes progress.

Shapes: U vectors that a thread holds at once, R rows, C channels of a block; a row is one pixel of
one sample, and rows are numbered within a ghost. A ticket is SUB sub-tiles of U R rows.
A group is a block of channels of a ghost: K ghosts, `blocks` blocks; only the last ghost differs.
"""

import triton
import triton.language as tl

from ghostbatch.ops.running_kernel import move
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

COUNTS = ["ghosts", "tiles", "last_tiles", "blocks", "delay", "draws", "aligned", "tracked_step"]
"""Numbers of which nothing is worth knowing at compile time, so another batch compiles nothing."""

# ----------------------------------------------------------------------------------------- forward


@triton.jit
def note(place_C, stride, n, sum_C, square_C, shift_C, eps, live_C):
    """Write down the statistics of a group of ``n`` rows, whose sums are about a shift."""
    about_C = sum_C / n
    variance_C = tl.maximum(square_C / n - about_C * about_C, 0.0)
    tl.store(place_C, shift_C + about_C, live_C)
    tl.store(place_C + stride, 1.0 / tl.sqrt_rn(variance_C + eps), live_C)
    tl.store(place_C + 2 * stride, variance_C * (n / (n - 1.0)), live_C)


@triton.jit(do_not_specialize=COUNTS)
def forward_kernel(
    x_ptr,
    residual_ptr,
    y_ptr,
    weight_ptr,
    bias_ptr,
    table_ptr,  # (3, K, C): mean, 1 / deviation, unbiased variance
    parts_ptr,  # (groups, tiles and bundles of them, 2, C of a block)
    counters_ptr,  # tickets, then those of each group, then one for each block
    mean_ptr,  # the running statistics, and how they move
    var_ptr,
    tracked_ptr,
    tracked_step,
    kept_share,
    rate,
    log_decay,
    eps,
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
    MOVING: tl.constexpr,
    TRACKED: tl.constexpr,
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
):
    """Normalise each ghost by its own statistics: ``y = relu(norm(x) + residual)``."""
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
            # Sums about the ghost's first values keep the variance sound in one pass.
            origin = base_of(ghost, ghost * 0, channel, ghost_rows, C, S, PLANES)
            at_C = column_C * S if PLANES else column_C
            shift_C = tl.load(x_ptr + origin + at_C, live_C, other=0.0).to(tl.float32)
            sum_RC = tl.zeros((R, BC), tl.float32)
            square_RC = tl.zeros((R, BC), tl.float32)
            first = tile * (SUB * U * R)
            x_tile = x_ptr + base_of(ghost, first, channel, ghost_rows, C, S, PLANES)
            for sub in range(SUB):
                row_R1U = first + sub * (U * R) + span(U, R)
                at_RCU = offsets(row_R1U, first, column_C, C, S, PLANES)
                keep_RCU = (row_R1U < rows) & live_C[None, :, None]
                x_RCU = load(x_tile, at_RCU, keep_RCU, EVEN, True, STREAM) - shift_C[None, :, None]
                if not EVEN:
                    x_RCU = tl.where(keep_RCU, x_RCU, 0.0)
                sum_RC += tl.sum(x_RCU, 2)
                square_RC += tl.sum(x_RCU * x_RCU, 2)
            parts = parts_ptr + group.to(tl.int64) * (most_tiles + bundles) * (2 * BC)
            counter = counters_ptr + 1 + group * (1 + bundles)
            sum_C, square_C = tl.sum(sum_RC, 0), tl.sum(square_RC, 0)
            if arrive(
                parts, counter, tile, count, most_tiles, sum_C, square_C, column_C, before,
                FAN, TREE,
            ):  # fmt: skip
                sum_C, square_C = add_up_group(
                    parts, count, most_tiles, column_C, live_C, FAN, TREE
                )
                place = table_ptr + ghost * C + channel_C
                note(place, ghosts * C, rows.to(tl.float32), sum_C, square_C, shift_C, eps, live_C)
                count_in(counter)
                block = group % blocks
                done = counters_ptr + 1 + ghosts * blocks * (1 + bundles) + block
                if count_in(done) == before * ghosts + ghosts - 1:  # noqa: SIM102 (counts anyway)
                    if MOVING:
                        move(
                            mean_ptr, var_ptr, tracked_ptr, table_ptr, 2 * ghosts * C, ghosts, C,
                            tracked_step, kept_share, rate, log_decay, channel_C, live_C,
                            TRACKED and block == 0, 16,
                        )  # fmt: skip

        if ticket >= delay:
            group, tile, count = locate(ticket - delay, ghosts, tiles, last_tiles, blocks)
            ghost, channel = group // blocks, (group % blocks) * BC
            rows = tl.where(ghost == ghosts - 1, last_rows, ghost_rows)
            channel_C, live_C = channel + column_C, channel + column_C < C
            weight_C = parameter(weight_ptr, channel_C, live_C, 1.0, WEIGHT)
            bias_C = parameter(bias_ptr, channel_C, live_C, 0.0, BIAS)
            first = tile * (SUB * U * R)
            base = base_of(ghost, first, channel, ghost_rows, C, S, PLANES)
            counter = counters_ptr + 1 + group * (1 + bundles)
            # The first values are on their way while it waits.
            row_R1U = first + span(U, R)
            at_RCU = offsets(row_R1U, first, column_C, C, S, PLANES)
            keep_RCU = (row_R1U < rows) & live_C[None, :, None]
            x_next = fetch(x_ptr + base, at_RCU, keep_RCU, EVEN, False, STREAM)
            wait_for(counter, (before + 1) * (rows_to_add(count, FAN, TREE) + 1))
            place = table_ptr + ghost * C + channel_C
            mean_C = tl.load(place, live_C, other=0.0, cache_modifier=".cg")
            invstd_C = tl.load(place + ghosts * C, live_C, other=0.0, cache_modifier=".cg")
            slope_C = weight_C * invstd_C
            for sub in tl.static_range(SUB):
                row_R1U = first + sub * (U * R) + span(U, R)
                at_RCU = offsets(row_R1U, first, column_C, C, S, PLANES)
                keep_RCU = (row_R1U < rows) & live_C[None, :, None]
                if sub > 0:
                    x_next = fetch(x_ptr + base, at_RCU, keep_RCU, EVEN, False, STREAM)
                x_RCU = x_next.to(tl.float32)
                y_RCU = (x_RCU - mean_C[None, :, None]) * slope_C[None, :, None]
                y_RCU += bias_C[None, :, None]
                if RESIDUAL:
                    y_RCU += load(residual_ptr + base, at_RCU, keep_RCU, EVEN, False, STREAM)
                if RELU:
                    y_RCU = tl.where(y_RCU <= 0.0, 0.0, y_RCU)  # NaN stays NaN
                store(y_ptr + base, at_RCU, y_RCU, keep_RCU, EVEN, STREAM)

        ticket = draw(counters_ptr, draws)[0] if LOOP else total + delay


# ---------------------------------------------------------------------------------------- backward


@triton.jit(do_not_specialize=COUNTS)
def backward_kernel(
    dy_ptr,
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
):
    """``dx = weight invstd (dy - mean(dy) - xhat mean(dy xhat))``, with means over the ghost."""
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
                x_RCU = x_next.to(tl.float32) - mean_C[None, :, None]
                dy_RCU = masked(
                    dy_next.to(tl.float32), x_RCU, y_ptr + base, at_RCU, keep_RCU, slope_C, bias_C,
                    EVEN, False, STREAM, RELU, RESIDUAL,
                )  # fmt: skip
                dx_RCU = x_RCU * tilt_C[None, :, None] + level_C[None, :, None]
                dx_RCU += dy_RCU * slope_C[None, :, None]
                store(dx_ptr + base, at_RCU, dx_RCU, keep_RCU, EVEN, STREAM)
                if RESIDUAL:
                    store(dresidual_ptr + base, at_RCU, dy_RCU, keep_RCU, EVEN, STREAM)

        ticket = draw(counters_ptr, draws)[0] if LOOP else total + delay
