"""The Triton kernels of max pooling with 2/2 and 3/2 windows, for channels_last batches.

Shapes: G groups of outputs that share an index byte, Q quads of 2x2 input pixels, C channels.
"""

import triton
import triton.language as tl


@triton.jit
def max_pool_forward_kernel(
    x_ptr,  # (N, H, W, C)
    y_ptr,  # (N, OH, OW, C)
    index_ptr,  # (ceil(N OH OW / PACK), C) bytes: position in the window, row by row
    outputs,  # N OH OW
    H: tl.constexpr,
    W: tl.constexpr,
    CHANNELS: tl.constexpr,
    K: tl.constexpr,
    PACK: tl.constexpr,
    SAVE: tl.constexpr,
    ROUNDS: tl.constexpr,
    BG: tl.constexpr,
    BC: tl.constexpr,
):
    """Write the maximum of every K x K window, stride 2, and its position in the window."""
    OH: tl.constexpr = (H - K) // 2 + 1
    OW: tl.constexpr = (W - K) // 2 + 1
    BITS: tl.constexpr = 8 // PACK
    block = tl.program_id(0) * (BG * ROUNDS)
    first = (block * PACK) // (OH * OW)  # image of the program's first output
    x_ptr += first.to(tl.int64) * (H * W * CHANNELS)
    y_ptr += block.to(tl.int64) * (PACK * CHANNELS)
    index_ptr += block.to(tl.int64) * CHANNELS
    channel_1C = tl.program_id(1) * BC + tl.arange(0, BC)[None, :]
    for turn in tl.static_range(ROUNDS):
        group_G1 = turn * BG + tl.arange(0, BG)[:, None]
        byte_GC = tl.zeros((BG, BC), tl.int32)
        for place in tl.static_range(PACK):
            output_G1 = (block + group_G1) * PACK + place
            keep_GC = (output_G1 < outputs) & (channel_1C < CHANNELS)
            image_G1 = output_G1 // (OH * OW)
            row_G1 = output_G1 // OW - image_G1 * OH
            column_G1 = output_G1 % OW
            pixel_G1 = (image_G1 - first) * (H * W) + row_G1 * (2 * W) + column_G1 * 2
            at_GC = pixel_G1 * CHANNELS + channel_1C
            best_GC = tl.load(x_ptr + at_GC, keep_GC, other=0.0).to(tl.float32)
            which_GC = tl.zeros((BG, BC), tl.int32)
            for tap in tl.static_range(1, K * K):
                tap_GC = at_GC + ((tap // K) * W + tap % K) * CHANNELS
                value_GC = tl.load(x_ptr + tap_GC, keep_GC, other=0.0).to(tl.float32)
                which_GC = tl.where(value_GC > best_GC, tap, which_GC)
                best_GC = tl.maximum(best_GC, value_GC, propagate_nan=tl.PropagateNan.ALL)
            to_GC = (group_G1 * PACK + place) * CHANNELS + channel_1C
            tl.store(y_ptr + to_GC, best_GC.to(y_ptr.dtype.element_ty), keep_GC)
            byte_GC |= which_GC << (place * BITS)
        if SAVE:
            keep_GC = ((block + group_G1) * PACK < outputs) & (channel_1C < CHANNELS)
            to_GC = group_G1 * CHANNELS + channel_1C
            tl.store(index_ptr + to_GC, byte_GC.to(tl.uint8), keep_GC)


@triton.jit
def window_gradient(
    dy_ptr, index_ptr, first, image_Q1, row_Q1, column_Q1, live_QC, channel_1C,
    OH: tl.constexpr, OW: tl.constexpr, CHANNELS: tl.constexpr, PACK: tl.constexpr,
):  # fmt: skip
    """Load the gradient of one window per quad and its position; zero where there is no window."""
    BITS: tl.constexpr = 8 // PACK
    live_QC = live_QC & (row_Q1 >= 0) & (row_Q1 < OH) & (column_Q1 >= 0) & (column_Q1 < OW)
    output_Q1 = (image_Q1 * OH + row_Q1) * OW + column_Q1
    base = first * (OH * OW)
    at_QC = (output_Q1 - base) * CHANNELS + channel_1C
    dy_ptr += base.to(tl.int64) * CHANNELS
    dy_QC = tl.load(dy_ptr + at_QC, live_QC, other=0.0).to(tl.float32)
    start = base // PACK
    byte_QC = tl.load(
        index_ptr + start.to(tl.int64) * CHANNELS
        + (output_Q1 // PACK - start) * CHANNELS + channel_1C,
        live_QC, other=0,
    ).to(tl.int32)  # fmt: skip
    if PACK > 1:
        byte_QC = (byte_QC >> ((output_Q1 % PACK) * BITS)) & ((1 << BITS) - 1)
    return dy_QC, byte_QC


@triton.jit
def max_pool_backward_kernel(
    dy_ptr,  # (N, OH, OW, C)
    index_ptr,  # of the forward
    dx_ptr,  # (N, H, W, C)
    quads,  # N ceil(H / 2) ceil(W / 2)
    H: tl.constexpr,
    W: tl.constexpr,
    CHANNELS: tl.constexpr,
    K: tl.constexpr,
    PACK: tl.constexpr,
    ROUNDS: tl.constexpr,
    BQ: tl.constexpr,
    BC: tl.constexpr,
):
    """Write the gradient of every input pixel: the sum over the windows whose maximum it is.

    A quad of 2x2 pixels meets the window that starts at its first pixel; with K = 3 also those that
    start two rows above, two columns to the left, or both.
    """
    OH: tl.constexpr = (H - K) // 2 + 1
    OW: tl.constexpr = (W - K) // 2 + 1
    QH: tl.constexpr = (H + 1) // 2
    QW: tl.constexpr = (W + 1) // 2
    block = tl.program_id(0) * (BQ * ROUNDS)
    first = block // (QH * QW)
    channel_1C = tl.program_id(1) * BC + tl.arange(0, BC)[None, :]
    dx_ptr += first.to(tl.int64) * (H * W * CHANNELS)
    dtype: tl.constexpr = dx_ptr.dtype.element_ty
    for turn in tl.static_range(ROUNDS):
        quad_Q1 = block + turn * BQ + tl.arange(0, BQ)[:, None]
        live_QC = (quad_Q1 < quads) & (channel_1C < CHANNELS)
        image_Q1 = quad_Q1 // (QH * QW)
        row_Q1 = quad_Q1 // QW - image_Q1 * QH
        column_Q1 = quad_Q1 % QW
        dy_QC, at_QC = window_gradient(
            dy_ptr, index_ptr, first, image_Q1, row_Q1, column_Q1, live_QC, channel_1C,
            OH, OW, CHANNELS, PACK,
        )  # fmt: skip
        dx00_QC = tl.where(at_QC == 0, dy_QC, 0.0)
        dx01_QC = tl.where(at_QC == 1, dy_QC, 0.0)
        dx10_QC = tl.where(at_QC == K, dy_QC, 0.0)
        dx11_QC = tl.where(at_QC == K + 1, dy_QC, 0.0)
        if K == 3:
            dy_QC, at_QC = window_gradient(
                dy_ptr, index_ptr, first, image_Q1, row_Q1 - 1, column_Q1, live_QC, channel_1C,
                OH, OW, CHANNELS, PACK,
            )  # fmt: skip
            dx00_QC += tl.where(at_QC == 6, dy_QC, 0.0)
            dx01_QC += tl.where(at_QC == 7, dy_QC, 0.0)
            dy_QC, at_QC = window_gradient(
                dy_ptr, index_ptr, first, image_Q1, row_Q1, column_Q1 - 1, live_QC, channel_1C,
                OH, OW, CHANNELS, PACK,
            )  # fmt: skip
            dx00_QC += tl.where(at_QC == 2, dy_QC, 0.0)
            dx10_QC += tl.where(at_QC == 5, dy_QC, 0.0)
            dy_QC, at_QC = window_gradient(
                dy_ptr, index_ptr, first, image_Q1, row_Q1 - 1, column_Q1 - 1, live_QC, channel_1C,
                OH, OW, CHANNELS, PACK,
            )  # fmt: skip
            dx00_QC += tl.where(at_QC == 8, dy_QC, 0.0)
        pixel_Q1 = (image_Q1 - first) * (H * W) + row_Q1 * (2 * W) + column_Q1 * 2
        to_QC = dx_ptr + pixel_Q1 * CHANNELS + channel_1C
        right_QC = live_QC & (column_Q1 * 2 + 1 < W) if W % 2 else live_QC
        lower_QC = live_QC & (row_Q1 * 2 + 1 < H) if H % 2 else live_QC
        tl.store(to_QC, dx00_QC.to(dtype), live_QC)
        tl.store(to_QC + CHANNELS, dx01_QC.to(dtype), right_QC)
        tl.store(to_QC + W * CHANNELS, dx10_QC.to(dtype), lower_QC)
        tl.store(to_QC + (W + 1) * CHANNELS, dx11_QC.to(dtype), lower_QC & right_QC)
