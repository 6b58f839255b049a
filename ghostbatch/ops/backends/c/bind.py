"""The C backend: calls the compiled kernels with ctypes."""

import ctypes
import os
from typing import Any

import torch
from torch import Tensor

from ghostbatch.ops.backends.base import SWITCH, Backend, Backward, NormCall
from ghostbatch.ops.backends.c.build import library
from ghostbatch.ops.backends.layouts import in_rows, is_readable
from ghostbatch.ops.running.stats import RunningStats

OTHER = 1  # there is a residual, or dy
SCALED = 2  # dy is multiplied by a factor per channel
RELU = 4  # apply ReLU
BY_RESULT = 8  # take ReLU's mask from y
BY_INPUT = 16  # recompute it from x
PASSED = 32  # store the gradient of the residual

ROOM, PADDED = 10, 16
"""Doubles of scratch space per thread and channel; channels are padded to a multiple of PADDED.
Backward also keeps two gradients per ghost and channel."""


class Work(ctypes.Structure):
    """As in kernels.c, which says what the fields mean."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "other", "mask", "out", "passed")),
        *((name, ctypes.c_void_p) for name in ("weight", "bias", "statistics", "room")),
        *((name, ctypes.c_long) for name in ("values", "samples", "rows", "channels", "pixels")),
        *((name, ctypes.c_long) for name in ("ghost", "ghosts")),
        *((name, ctypes.c_long) for name in ("threads", "whole", "together", "parts")),
        ("eps", ctypes.c_double),
        ("flags", ctypes.c_int),
    )


class CRunning(ctypes.Structure):
    """As in kernels.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("mean", "variance", "tracked")),
        ("momentum", ctypes.c_double),
        ("by_mean", ctypes.c_int),
    )


class CBackend(Backend):
    """One call forward, which also updates running statistics, and one backward."""

    name = "the C kernels"
    key = "c"

    def available(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Return whether this is a CPU and the kernels compile, on the first call per dtype."""
        interpreting = os.environ.get(SWITCH) == "interpret"  # which takes CPU tensors, too
        return device.type == "cpu" and not interpreting and library(dtype) is not None

    def supports(self, call: NormCall) -> bool:
        """Return whether the tensors can be read as memory."""
        return is_readable(call.x, call.weight, call.bias, call.residual)

    def normalise(
        self, call: NormCall, y: Tensor, statistics: Tensor, running: RunningStats | None
    ) -> None:
        """As `Backend.normalise`."""
        flags = (RELU if call.activation else 0) | (0 if call.residual is None else OTHER)
        tensors = {"out": y, "other": call.residual}
        if running is not None and not running.supports_fused_update(statistics.dtype):
            running = None
        _run("forward", call, statistics, tensors, flags, running and _running(running))
        if running is not None:
            running.mark_updated()

    def differentiate(self, call: NormCall, grads: Backward) -> None:
        """As `Backend.differentiate`."""
        flags = OTHER | SCALED
        if call.activation:
            flags |= BY_INPUT if grads.y is None else BY_RESULT | PASSED
        tensors = {"out": grads.dx, "other": grads.dy, "mask": grads.y, "passed": grads.dresidual}
        sums = ctypes.c_void_p(grads.dparameters.data_ptr())
        _run("backward", call, grads.statistics, tensors, flags, sums)


def _run(
    kernel: str,
    call: NormCall,
    statistics: Tensor,
    tensors: dict[str, Tensor | None],
    flags: int,
    extra: Any,
) -> None:
    """Call a kernel with a `Work`, and ``extra``: running statistics or parameter gradients."""
    x = call.x
    samples, channels = x.shape[:2]
    pixels = x.numel() // (samples * channels)
    rows, pixels = (pixels, 1) if in_rows(x) else (1, pixels)
    ghosts, threads = statistics.shape[1], torch.get_num_threads()
    padded = -(-channels // PADDED) * PADDED
    doubles = 2 * threads * ROOM * padded + (2 * ghosts * channels if kernel == "backward" else 0)
    room = torch.empty(doubles, dtype=torch.float64)
    weight, bias = (
        None if p is None else p.to(statistics.dtype).contiguous() for p in (call.weight, call.bias)
    )
    tensors |= {"x": x, "weight": weight, "bias": bias, "statistics": statistics, "room": room}
    work = Work(
        **{name: tensor.data_ptr() for name, tensor in tensors.items() if tensor is not None},
        values=x.numel(),
        samples=samples,
        rows=rows,
        channels=channels,
        pixels=pixels,
        ghost=call.ghost,
        ghosts=ghosts,
        threads=threads,
        eps=call.eps,
        flags=flags,
    )
    getattr(library(x.dtype), kernel)(ctypes.byref(work), extra)


def _running(running: RunningStats) -> Any:
    tracked = running.num_batches_tracked
    return ctypes.byref(
        CRunning(
            mean=running.mean.data_ptr(),
            variance=running.var.data_ptr(),
            tracked=None if tracked is None else tracked.data_ptr(),
            momentum=running.momentum,
            by_mean=running.policy == "mean",
        )
    )
