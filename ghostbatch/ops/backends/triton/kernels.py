"""The Triton kernels of ghost norm: they sum up one ghost while they normalise an earlier one.

The batch is cut into tiles, in the order of the ghosts. A program takes a ticket, t, and
    1. sums up tile t, stores the sums and counts itself in; the last program to do so for a group
       (the tiles that share statistics) adds up the sums, always in the same order;
    2. normalises tile t - delay, which is still in the L2 cache, once its group is complete.
The delay is at least a group, so the tickets that step 2 waits for were taken earlier, by programs
that are running and whose step 1 waits for nothing: any number of resident programs, down to one,
makes progress.

Shapes: U vectors that a thread holds at once, R rows, C channels of a block; a row is one pixel of
one sample, and rows are numbered within a ghost. A ticket is SUB sub-tiles of U R rows.
A group is a block of channels of a ghost: K ghosts, `blocks` blocks; only the last ghost differs.

Both kernels take these arguments, which `tiling.make_plan` computes:
    ghosts                  K
    aligned                 C / ALIGN, so that the compiler knows a divisor of C
    ghost_rows, last_rows   rows of a ghost; rows of the last one
    tiles, last_tiles       tiles of a group; tiles of a group of the last ghost
    blocks, delay           see above
    tickets_per_run         tickets that a run of the kernel takes, with those beyond the last tile
    S, PLANES               pixels of a plane (1 in rows); whether the batch is in planes
    EVEN                    whether tiles fill all ghosts and blocks exactly
    U, R, BC, SUB           sizes of a tile, see above; BC is the C of the shapes
    FAN, TREE               sums that are added at once; whether that takes two steps
    LOOP                    whether a program takes tickets until none is left
    STREAM                  hints to the cache, see `Tuning`
and these flags:
    WEIGHT, BIAS, RESIDUAL  whether those are given
    RELU                    whether ReLU follows
    UPDATE_RUNNING          whether running statistics are updated
    TRACKED                 whether they have a number of batches
"""

import triton
import triton.language as tl

from ghostbatch.ops.backends.triton.primitives import (
    add_up,
    add_up_group,
    base_of,
    count_in,
    fetch,
    load,
    load_stored,
    locate,
    next_ticket,
    parameter,
    publish_sums,
    read_affine,
    relu_grad,
    rows_to_add,
    store,
    store_and_round,
    subtile,
    wait_for,
    write_statistics,
)
from ghostbatch.ops.backends.triton.running import update_running_stats

COUNTS = [
    *("ghosts", "tiles", "last_tiles", "blocks", "delay"),
    *("tickets_per_run", "aligned", "tracked_step"),
]
"""Numbers for whose values no code is specialised, so another batch size compiles nothing."""


@triton.jit(do_not_specialize=COUNTS)
def forward_kernel(
    x_ptr,  # (N, C, ...), in rows or in planes; so are the residual and y
    residual_ptr,
    y_ptr,
    weight_ptr,  # (C), as is the bias
    bias_ptr,
    statistics_ptr,  # (3, K, C): mean, 1 / deviation, unbiased variance
    partial_sums_ptr,  # (groups, tiles and bundles of them, 2, BC): scratch space
    counters_ptr,  # tickets, then those of each group, then one for each block
    # The running statistics, as in `update_running_stats`.
    mean_ptr, var_ptr, tracked_ptr, tracked_step, kept, rate, log_decay,
    eps,  # added to the variance
    # The plan and the flags, as explained above.
    ghosts, aligned, ghost_rows, last_rows, tiles, last_tiles, blocks, delay, tickets_per_run,
    S: tl.constexpr, PLANES: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr,
    UPDATE_RUNNING: tl.constexpr, TRACKED: tl.constexpr, RESIDUAL: tl.constexpr,
    RELU: tl.constexpr, EVEN: tl.constexpr, U: tl.constexpr, R: tl.constexpr, BC: tl.constexpr,
    SUB: tl.constexpr, FAN: tl.constexpr, TREE: tl.constexpr, ALIGN: tl.constexpr,
    LOOP: tl.constexpr, STREAM: tl.constexpr,
):  # fmt: skip
    """Normalise each ghost by its own statistics: ``y = relu(norm(x) + residual)``."""
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
            # Sums about the ghost's first values keep the variance sound in one pass.
            origin = base_of(ghost, ghost * 0, channel, ghost_rows, C, S, PLANES)
            at_C = column_C * S if PLANES else column_C
            shift_C = tl.load(x_ptr + origin + at_C, live_C, other=0.0).to(tl.float32)
            sum_RC = tl.zeros((R, BC), tl.float32)
            square_RC = tl.zeros((R, BC), tl.float32)
            first = tile * (SUB * U * R)
            x_tile = x_ptr + base_of(ghost, first, channel, ghost_rows, C, S, PLANES)
            for sub in range(SUB):
                at_RCU, keep_RCU = subtile(first, sub, rows, column_C, live_C, C, S, PLANES, U, R)
                x_RCU = load(x_tile, at_RCU, keep_RCU, EVEN, True, STREAM) - shift_C[None, :, None]
                if not EVEN:
                    x_RCU = tl.where(keep_RCU, x_RCU, 0.0)
                sum_RC += tl.sum(x_RCU, 2)
                square_RC += tl.sum(x_RCU * x_RCU, 2)
            parts = partial_sums_ptr + group.to(tl.int64) * (most_tiles + bundles) * (2 * BC)
            counter = counters_ptr + 1 + group * (1 + bundles)
            sum_C, square_C = tl.sum(sum_RC, 0), tl.sum(square_RC, 0)
            if publish_sums(
                parts, counter, tile, count, most_tiles, sum_C, square_C, column_C, runs_before,
                FAN, TREE,
            ):  # fmt: skip
                sum_C, square_C = add_up_group(
                    parts, count, most_tiles, column_C, live_C, FAN, TREE
                )
                place = statistics_ptr + ghost * C + channel_C
                write_statistics(
                    place, ghosts * C, rows.to(tl.float32), sum_C, square_C, shift_C, eps, live_C
                )
                count_in(counter)
                block = group % blocks
                done = counters_ptr + 1 + ghosts * blocks * (1 + bundles) + block
                if count_in(done) == runs_before * ghosts + ghosts - 1:  # noqa: SIM102
                    if UPDATE_RUNNING:
                        update_running_stats(
                            mean_ptr, var_ptr, tracked_ptr, moments_ptr=statistics_ptr,
                            moments_stride=2 * ghosts * C, ghosts=ghosts, C=C, kept=kept, rate=rate,
                            tracked_step=tracked_step, log_decay=log_decay, channel_C=channel_C,
                            live_C=live_C, count_batches=TRACKED and block == 0, R=16,
                        )  # fmt: skip

        if ticket >= delay:
            group, ghost, channel, rows, tile, count = locate(
                ticket - delay, ghosts, tiles, last_tiles, blocks, ghost_rows, last_rows, BC
            )
            channel_C, live_C = channel + column_C, channel + column_C < C
            weight_C = parameter(weight_ptr, channel_C, live_C, 1.0, WEIGHT)
            bias_C = parameter(bias_ptr, channel_C, live_C, 0.0, BIAS)
            first = tile * (SUB * U * R)
            base = base_of(ghost, first, channel, ghost_rows, C, S, PLANES)
            counter = counters_ptr + 1 + group * (1 + bundles)
            # The first values are on their way while it waits.
            at_RCU, keep_RCU = subtile(first, 0, rows, column_C, live_C, C, S, PLANES, U, R)
            x_next = fetch(x_ptr + base, at_RCU, keep_RCU, EVEN, False, STREAM)
            wait_for(counter, (runs_before + 1) * (rows_to_add(count, FAN, TREE) + 1))
            place = statistics_ptr + ghost * C + channel_C
            mean_C = tl.load(place, live_C, other=0.0, cache_modifier=".cg")
            invstd_C = tl.load(place + ghosts * C, live_C, other=0.0, cache_modifier=".cg")
            slope_C = weight_C * invstd_C
            for sub in tl.static_range(SUB):
                at_RCU, keep_RCU = subtile(first, sub, rows, column_C, live_C, C, S, PLANES, U, R)
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

        ticket = next_ticket(counters_ptr, tickets_per_run)[0] if LOOP else total + delay


@triton.jit(do_not_specialize=COUNTS)
def backward_kernel(
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
    # The plan and the flags; with RESIDUAL, ReLU's mask is read from y. The masked gradient is then
    # a result: the first step stores it, and the second reads it instead of all gradients and y.
    ghosts, aligned, ghost_rows, last_rows, tiles, last_tiles, blocks, delay, tickets_per_run,
    S: tl.constexpr, PLANES: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr, RELU: tl.constexpr, EVEN: tl.constexpr, U: tl.constexpr,
    R: tl.constexpr, BC: tl.constexpr, SUB: tl.constexpr, FAN: tl.constexpr, TREE: tl.constexpr,
    ALIGN: tl.constexpr, LOOP: tl.constexpr, STREAM: tl.constexpr, JOINED: tl.constexpr,
):  # fmt: skip
    """``dx = weight invstd (dy - mean(dy) - xhat mean(dy xhat))``, with means over the ghost."""
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
                    dy_RCU = store_and_round(
                        dresidual_ptr + base, at_RCU, dy_RCU, keep_RCU, EVEN, STREAM
                    )
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
                x_RCU = x_next.to(tl.float32) - mean_C[None, :, None]
                if RESIDUAL:
                    dy_RCU = load_stored(dresidual_ptr + base, at_RCU, keep_RCU, EVEN)
                else:
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
