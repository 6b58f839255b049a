"""Max pooling by the Triton kernels, for autograd.

The forward saves which pixel of its window each output came from, in 2 bits (2/2) or a byte (3/2);
the input is not needed again. In the backward every input pixel looks up the windows that it lies
in, so there are no atomics, and the result is the same at every run.

Bytes per input byte in bf16, 2/2: forward 1 read + 1/4 + 1/32 written, backward 1/4 + 1/32 read + 1
written. Finding the maximum again from x instead of saving its place would read x once more.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton
from torch import Tensor

from ghostbatch.ops.backends.base import on_device
from ghostbatch.ops.pool.kernels import max_pool_backward_kernel, max_pool_forward_kernel


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
    """Return the fastest settings on an H200, where memory bandwidth limits both passes."""
    if kernel == 3:
        return Tuning(rounds=2, pack=False)
    return Tuning(warps=8, channels=128) if channels >= 128 else Tuning()


def packing(kernel: int, channels: int) -> int:
    """Return how many outputs share a byte of the index."""
    return (4 if kernel == 2 else 2) if tuning(kernel, channels).pack else 1


def _empty(like: Tensor, *shape: int) -> Tensor:
    return torch.empty(
        shape, dtype=like.dtype, device=like.device, memory_format=torch.channels_last
    )


def forward(x: Tensor, kernel: int, *, save: bool) -> tuple[Tensor, Tensor]:
    """Pool a dense channels_last batch; return the result and the saved index."""
    N, C, H, W = x.shape
    OH, OW = (H - kernel) // 2 + 1, (W - kernel) // 2 + 1
    settings, pack = tuning(kernel, C), packing(kernel, C)
    y = _empty(x, N, C, OH, OW)
    groups = triton.cdiv(N * OH * OW, pack)
    index = torch.empty((groups, C) if save else (0, C), dtype=torch.uint8, device=x.device)
    BG, BC = settings.tile(x)
    with on_device(x.device):
        max_pool_forward_kernel[(triton.cdiv(groups, BG * settings.rounds), triton.cdiv(C, BC))](
            x, y, index, N * OH * OW,
            H=H, W=W, CHANNELS=C, K=kernel, PACK=pack, SAVE=save,
            ROUNDS=settings.rounds, BG=BG, BC=BC, num_warps=settings.warps,
        )  # fmt: skip
    return y, index


def backward(dy: Tensor, index: Tensor, size: tuple[int, int], kernel: int) -> Tensor:
    """Return the gradient of an input of ``size`` pixels, given that of the output."""
    (N, C, _, _), (H, W) = dy.shape, size
    settings = tuning(kernel, C)
    dx = _empty(dy, N, C, H, W)
    quads = N * ((H + 1) // 2) * ((W + 1) // 2)
    BQ, BC = settings.tile(dy)
    with on_device(dy.device):
        max_pool_backward_kernel[(triton.cdiv(quads, BQ * settings.rounds), triton.cdiv(C, BC))](
            dy, index, dx, quads,
            H=H, W=W, CHANNELS=C, K=kernel, PACK=packing(kernel, C),
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
        dx = MaxPoolGradient.apply(dy, index, ctx.size, ctx.kernel)  # type: ignore[no-untyped-call]
        return dx, None


class MaxPoolGradient(torch.autograd.Function):
    """The gradient of max pooling as a function of dy, which double backward differentiates."""

    @staticmethod
    def forward(ctx: Any, dy: Tensor, index: Tensor, size: tuple[int, int], kernel: int) -> Tensor:
        """Return the gradient of the input, given that of the output and the saved index."""
        ctx.save_for_backward(index)
        ctx.size, ctx.kernel, ctx.shape = size, kernel, dy.shape
        return backward(dy.contiguous(memory_format=torch.channels_last), index, size, kernel)

    @staticmethod
    def backward(ctx: Any, ddx: Tensor) -> tuple[Tensor | None, ...]:
        """Return the values of ``ddx`` at the maxima of the windows."""
        (index,), (N, C, OH, OW), kernel = ctx.saved_tensors, ctx.shape, ctx.kernel
        pack = packing(kernel, C)
        shifts = torch.arange(pack, device=index.device)[:, None] * (8 // pack)
        which = (index[:, None].int() >> shifts) & ((1 << 8 // pack) - 1)
        which = which.flatten(0, 1)[: N * OH * OW].view(N, OH, OW, C).permute(0, 3, 1, 2)
        row = 2 * torch.arange(OH, device=index.device)[:, None] + which // kernel
        column = 2 * torch.arange(OW, device=index.device) + which % kernel
        at = (row * ctx.size[1] + column).flatten(2)
        return ddx.flatten(2).gather(2, at).view(ctx.shape), None, None, None
