"""Max pooling for channels_last batches in Triton: 2/2 and 3/2 windows without padding.

The forward saves which pixel of its window each output came from, in 2 bits (2/2) or a byte (3/2);
the input itself is not needed again. The backward gathers: every input pixel looks up the windows
that it lies in, so there are no atomics and the result is deterministic. Values, NaN and ties (the
first maximum of a window in scan order) are those of ``F.max_pool2d``. Only the gradient of a
window with a NaN in it goes elsewhere: to the largest value before the first NaN. PyTorch's choice,
the last NaN, would double the instructions of the forward.

Counting bytes per input byte in bf16, 2/2: forward 1 read + 1/4 + 1/32 written, backward 1/4 + 1/32
read + 1 written. Recomputing the maximum from x instead of saving it would add a whole pass.

ReLU commutes with max pooling, and so does a per-channel affine map if a negative slope takes the
minimum instead. So in conv, norm, ReLU, pool (VGG) one kernel can pool first and then do the affine
map and the ReLU on a quarter of the values. In conv, pool, norm, ReLU (C1) the statistics are those
of the pooled values, so nothing is gained by moving the norm.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor, nn

Model = TypeVar("Model", bound=nn.Module)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class Tuning:
    """Settings that change the speed and no result."""

    warps: int = 4
    rounds: int = 1
    """Tiles that a program works on; a tile is one vector of 16 bytes per thread."""
    channels: int = 64
    """Channels of a tile, at most."""
    pack: bool = True
    """Whether several outputs share a byte of the saved index."""

    def tile(self, x: Tensor) -> tuple[int, int]:
        """Return the rows and channels of a tile.

        A thread holds one vector of ``x`` and the index bytes of as many values. Larger tiles would
        make Triton lay out bytes 16 to a thread and exchange them through shared memory.
        """
        values = self.warps * 32 * (16 // x.element_size())
        channels = min(triton.next_power_of_2(x.shape[1]), self.channels)
        return max(1, values // channels), channels


@lru_cache
def tuning(kernel: int, channels: int) -> Tuning:
    """Return the fastest settings on an H200, where both passes run at the memory's pace."""
    if kernel == 3:
        return Tuning(rounds=2, pack=False)
    return Tuning(warps=8, channels=128) if channels >= 128 else Tuning()


# ----------------------------------------------------------------------------------------- kernels
# Shapes: G groups of outputs that share an index byte, Q quads of 2x2 input pixels, C channels.


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


# ---------------------------------------------------------------------------------------- launches


def packing(kernel: int, settings: Tuning) -> int:
    """Return how many outputs share a byte of the index."""
    return (4 if kernel == 2 else 2) if settings.pack else 1


def _empty(like: Tensor, *shape: int) -> Tensor:
    return torch.empty(
        shape, dtype=like.dtype, device=like.device, memory_format=torch.channels_last
    )


def forward(
    x: Tensor, kernel: int, *, save: bool = True, settings: Tuning | None = None
) -> tuple[Tensor, Tensor]:
    """Pool a dense channels_last batch; return the result and the saved index."""
    settings = settings or tuning(kernel, x.shape[1])
    N, C, H, W = x.shape
    OH, OW = (H - kernel) // 2 + 1, (W - kernel) // 2 + 1
    pack = packing(kernel, settings)
    y = _empty(x, N, C, OH, OW)
    groups = triton.cdiv(N * OH * OW, pack)
    index = torch.empty((groups, C) if save else (0, C), dtype=torch.uint8, device=x.device)
    BG, BC = settings.tile(x)
    max_pool_forward_kernel[(triton.cdiv(groups, BG * settings.rounds), triton.cdiv(C, BC))](
        x, y, index, N * OH * OW,
        H=H, W=W, CHANNELS=C, K=kernel, PACK=pack, SAVE=save,
        ROUNDS=settings.rounds, BG=BG, BC=BC, num_warps=settings.warps,
    )  # fmt: skip
    return y, index


def backward(
    dy: Tensor,
    index: Tensor,
    size: tuple[int, int],
    kernel: int,
    *,
    pack: int,
    settings: Tuning | None = None,
) -> Tensor:
    """Return the gradient of an input of ``size`` pixels, given that of the output."""
    settings = settings or tuning(kernel, dy.shape[1])
    N, C, _, _ = dy.shape
    H, W = size
    dx = _empty(dy, N, C, H, W)
    quads = N * ((H + 1) // 2) * ((W + 1) // 2)
    BQ, BC = settings.tile(dy)
    max_pool_backward_kernel[(triton.cdiv(quads, BQ * settings.rounds), triton.cdiv(C, BC))](
        dy, index, dx, quads,
        H=H, W=W, CHANNELS=C, K=kernel, PACK=pack,
        ROUNDS=settings.rounds, BQ=BQ, BC=BC, num_warps=settings.warps,
    )  # fmt: skip
    return dx


class MaxPool(torch.autograd.Function):
    """Max pooling of a dense channels_last batch."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kernel: int) -> Tensor:
        """Pool; save the index if a gradient is wanted."""
        y, index = forward(x, kernel, save=ctx.needs_input_grad[0])
        ctx.save_for_backward(index)
        ctx.size, ctx.kernel = (x.shape[2], x.shape[3]), kernel
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        """Gather the gradient; windows that overlap are summed in fp32."""
        (index,) = ctx.saved_tensors
        dy = dy.contiguous(memory_format=torch.channels_last)
        pack = packing(ctx.kernel, tuning(ctx.kernel, dy.shape[1]))
        return backward(dy, index, ctx.size, ctx.kernel, pack=pack), None


class MeanPool(torch.autograd.Function):
    """The mean over all pixels of a channels_last batch, with a dense gradient.

    PyTorch's gradient is expanded or laid out otherwise, so that the layer before has to copy it.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """From (N, C, H, W) to (N, C, 1, 1)."""
        ctx.shape = x.shape
        N, C, H, W = x.shape
        return x.permute(0, 2, 3, 1).reshape(N, H * W, C).mean(1).view(N, C, 1, 1)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        """Spread the gradient over the pixels."""
        N, C, H, W = ctx.shape
        rows = (dy / (H * W)).permute(0, 2, 3, 1).expand(N, H, W, C)
        return rows.contiguous().permute(0, 3, 1, 2)


# ------------------------------------------------------------------------------------------ layers


def max_pool2d(x: Tensor, kernel: int) -> Tensor:
    """``F.max_pool2d(x, kernel, 2)``, by the kernels where they serve."""
    if serves(x, kernel):
        return MaxPool.apply(x, kernel)  # type: ignore[no-any-return, no-untyped-call]
    return F.max_pool2d(x, kernel, 2)


def serves(x: Tensor, kernel: int) -> bool:
    """Whether the kernels take this batch: dense channels_last, on a GPU or interpreted."""
    return (
        kernel in (2, 3)
        and x.dim() == 4
        and min(x.shape[2:]) >= kernel
        and x.numel() > 0
        and x.dtype in DTYPES
        and (x.is_cuda or triton.knobs.runtime.interpret)
        and x.is_contiguous(memory_format=torch.channels_last)
    )


class FastMaxPool2d(nn.MaxPool2d):
    """nn.MaxPool2d over 2 or 3 pixels with stride 2, by the kernels where they serve."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (nn.MaxPool2d's name for it)
        """From (N, C, H, W) to (N, C, OH, OW)."""
        return max_pool2d(input, self.kernel_size)  # type: ignore[arg-type]


class FastMeanPool2d(nn.AdaptiveAvgPool2d):
    """nn.AdaptiveAvgPool2d(1) with a dense channels_last gradient."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (nn.AdaptiveAvgPool2d's name for it)
        """From (N, C, H, W) to (N, C, 1, 1)."""
        return MeanPool.apply(input)  # type: ignore[no-any-return, no-untyped-call]


def to_fast_pools(model: Model) -> Model:
    """Swap the class of poolings that have a faster twin here; return the model."""
    for layer in model.modules():
        if type(layer) is nn.MaxPool2d and _known(layer):
            layer.__class__ = FastMaxPool2d
        elif type(layer) is nn.AdaptiveAvgPool2d and layer.output_size == 1:
            layer.__class__ = FastMeanPool2d
    return model


def _known(layer: nn.MaxPool2d) -> bool:
    return (
        layer.kernel_size in (2, 3)
        and layer.stride == 2
        and layer.padding == 0
        and layer.dilation == 1
        and not layer.ceil_mode
        and not layer.return_indices
    )
