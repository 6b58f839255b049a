"""Which code does the work of ghost norm: kernels where they serve, else plain tensor code.

Triton's kernels serve CUDA tensors of three dtypes. Triton is imported when the first one arrives,
and given up with one warning if it does not work. On a CPU, kernels in C serve where a compiler is
at hand (see `cpu_build`). GHOSTBATCH_KERNELS=0 turns both off; GHOSTBATCH_KERNELS=interpret runs
those for CUDA on CPU tensors in Triton's interpreter, for tests (TRITON_INTERPRET=1 must be set,
too, before Triton is imported).
"""

import os
import warnings
from types import ModuleType

import torch
from torch import Tensor

from ghostbatch.ops import cpu, plain
from ghostbatch.ops.buffers import Buffers

SWITCH = "GHOSTBATCH_KERNELS"
DTYPES = (torch.bfloat16, torch.float16, torch.float32)

_broken: list[str] = []
"""Why the kernels were given up, if they were."""


def kernels_serve(x: Tensor) -> bool:
    """Whether a batch goes to kernels, as far as its device and dtype can tell."""
    return triton_serves(x) or _c_serves(x)


def triton_serves(x: Tensor) -> bool:
    """Whether it goes to Triton's."""
    if x.dtype not in DTYPES or _broken or not x.numel():
        return False
    switch = os.environ.get(SWITCH, "1")
    if x.device.type == "cuda":
        # A GPU that speaks HIP has other caches and waves of 64: nobody has measured there.
        return switch != "0" and torch.version.hip is None
    return x.device.type == "cpu" and switch == "interpret"


def _c_serves(x: Tensor, *others: Tensor | None) -> bool:
    """Whether it goes to those for a CPU, with the tensors that come with it."""
    return os.environ.get(SWITCH, "1") not in ("0", "interpret") and cpu.serves(x, *others)


def forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    ghost: int,
    eps: float,
    activation: str | None = None,
    residual: Tensor | None = None,
    moving: Buffers | None = None,
) -> tuple[Tensor, Tensor]:
    """As `plain.forward`, by whatever is fastest; kernels move running statistics on the way."""
    if (fused := _triton_for(x)) is not None and fused.fits(x, ghost):
        try:
            result: tuple[Tensor, Tensor] = fused.forward(
                x, weight, bias, ghost, eps, activation, residual, moving
            )
            return result
        except Exception as error:
            _give_up(error)
    if _c_serves(x, weight, bias, residual):
        return cpu.forward(x, weight, bias, ghost, eps, activation, residual, moving)
    return plain.forward(x, weight, bias, ghost, eps, activation, residual)


def backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    statistics: Tensor,
    ghost: int,
    activation: str | None = None,
    bias: Tensor | None = None,
    y: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `plain.backward`, by whatever is fastest."""
    if (fused := _triton_for(x)) is not None and fused.fits(x, ghost):
        try:
            result: tuple[Tensor, Tensor, Tensor] = fused.backward(
                dy, x, weight, statistics, ghost, activation, bias, y
            )
            return result
        except Exception as error:
            _give_up(error)
    if _c_serves(x, dy, weight, bias, y):
        return cpu.backward(dy, x, weight, statistics, ghost, activation, bias, y)
    return plain.backward(dy, x, weight, statistics, ghost, activation, bias, y)


def move_running(buffers: Buffers, moments: Tensor) -> bool:
    """Move the running statistics by the ghosts' (2, K, C) if a kernel can; say whether it did."""
    if not buffers.suit(torch.float32) or (fused := _triton_for(moments)) is None:
        return False
    if moments.dtype != torch.float32 or not moments[0].is_contiguous():
        return False
    try:
        fused.move_running(buffers, moments)
    except Exception as error:
        _give_up(error)
        return False
    return True


def _triton_for(x: Tensor) -> ModuleType | None:
    """The module that launches kernels, if they serve this tensor."""
    if not triton_serves(x):
        return None
    try:
        from ghostbatch.ops import fused  # noqa: PLC0415 (imports triton)
    except Exception as error:
        _give_up(error)
        return None
    return fused


def _give_up(error: Exception) -> None:
    """Never try the kernels again; say so once. A lack of memory is not the kernels' fault."""
    if isinstance(error, torch.OutOfMemoryError):
        raise error
    if not _broken:
        _broken.append(repr(error))
        warnings.warn(
            f"the Triton kernels do not work here, so slower, plain code is used: {error!r}",
            stacklevel=4,
        )
