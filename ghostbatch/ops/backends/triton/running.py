"""The update of running statistics in Triton: at the end of the forward, or as one kernel."""

import triton
import triton.language as tl


@triton.jit
def update_running_stats(
    mean_ptr,  # (C): the running statistics
    var_ptr,  # (C)
    tracked_ptr,  # (): number of batches
    moments_ptr,  # (2, K, C): means and unbiased variances of the ghosts, oldest first
    moments_stride,  # between the means and the variances
    ghosts,  # K
    C,
    tracked_step,  # added to the number of batches
    kept,  # weight of the running statistics before the update
    rate,  # weight of the newest ghost
    log_decay,  # base-2 logarithm of the ratio between the weights of two ghosts in a row
    channel_C,
    live_C,  # whether the channels exist
    count_batches,  # whether this program updates the number of batches
    R: tl.constexpr,  # ghosts at a time
):
    """``r <- kept r + sum_k rate 2**(log_decay (K-1-k)) s_k``, for mean and variance alike."""
    mean_RC = tl.zeros((R, channel_C.shape[0]), tl.float32)
    var_RC = tl.zeros((R, channel_C.shape[0]), tl.float32)
    for start in range(0, ghosts, R):
        ghost_R = start + tl.arange(0, R)
        age_R = tl.maximum(ghosts - 1 - ghost_R, 0).to(tl.float32)
        weight_R = rate * tl.exp2(log_decay * age_R)
        at_RC = ghost_R[:, None] * C + channel_C[None, :]
        live_RC = (ghost_R < ghosts)[:, None] & live_C[None, :]
        weight_RC = tl.where(live_RC, weight_R[:, None], 0.0)
        # ".cg": from the L2 cache, where other multiprocessors' stores are seen.
        one_RC = tl.load(moments_ptr + at_RC, live_RC, other=0.0, cache_modifier=".cg")
        two_RC = tl.load(
            moments_ptr + moments_stride + at_RC, live_RC, other=0.0, cache_modifier=".cg"
        )
        mean_RC += weight_RC * one_RC
        var_RC += weight_RC * two_RC
    mean_C = kept * tl.load(mean_ptr + channel_C, live_C, other=0.0) + tl.sum(mean_RC, 0)
    var_C = kept * tl.load(var_ptr + channel_C, live_C, other=0.0) + tl.sum(var_RC, 0)
    tl.store(mean_ptr + channel_C, mean_C, live_C)
    tl.store(var_ptr + channel_C, var_C, live_C)
    if count_batches:
        tl.store(tracked_ptr, tl.load(tracked_ptr) + tracked_step)


@triton.jit
def running_kernel(
    mean_ptr, var_ptr, tracked_ptr, moments_ptr, moments_stride, ghosts, C, tracked_step,
    kept, rate, log_decay,
    TRACKED: tl.constexpr,  # whether there is a number of batches
    R: tl.constexpr,
    BC: tl.constexpr,  # channels of a block
):  # fmt: skip
    """Update the running statistics of a block of channels; arguments as above."""
    channel_C = tl.program_id(0) * BC + tl.arange(0, BC)
    update_running_stats(
        mean_ptr, var_ptr, tracked_ptr, moments_ptr=moments_ptr, moments_stride=moments_stride,
        ghosts=ghosts, C=C, kept=kept, rate=rate, tracked_step=tracked_step, log_decay=log_decay,
        channel_C=channel_C, live_C=channel_C < C,
        count_batches=TRACKED and tl.program_id(0) == 0, R=R,
    )  # fmt: skip
