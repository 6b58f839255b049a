"""Calls the CPU kernels of ghost norm: the twin of `fused`."""

import ctypes
from typing import Any

import torch
from torch import Tensor, nn

from ghostbatch.ops.buffers import Buffers
from ghostbatch.ops.cpu_build import library
from ghostbatch.ops.layouts import as_dense_as, in_rows, workable
from ghostbatch.ops.plain import statistics_dtype
from ghostbatch.ops.reference import ghost_sizes

OTHER, SCALED, RELU, BY_RESULT, BY_INPUT, PASSED = 1, 2, 4, 8, 16, 32
"""What a pass over a ghost has to do, as in the kernels."""

ROOM, PADDED = 10, 16
"""Doubles of scratch space that a thread needs per channel, counted in so many, as there."""


class Work(ctypes.Structure):
    """As in the kernels, which say what the fields mean."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "other", "mask", "out", "passed")),
        *((name, ctypes.c_void_p) for name in ("weight", "bias", "statistics", "room")),
        *((name, ctypes.c_long) for name in ("values", "samples", "rows", "channels", "pixels")),
        *((name, ctypes.c_long) for name in ("ghost", "ghosts")),
        *((name, ctypes.c_long) for name in ("threads", "whole", "together", "parts")),
        ("eps", ctypes.c_double),
        ("how", ctypes.c_int),
    )


class Moving(ctypes.Structure):
    """As in the kernels."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("mean", "variance", "tracked")),
        ("momentum", ctypes.c_double),
        ("at_once", ctypes.c_int),
    )


def serves(x: Tensor, *others: Tensor | None) -> bool:
    """Whether there are kernels for such a batch; the first that asks has them compiled.

    They read memory, so all tensors must be what lies there: no subclass that holds others, no
    view that is negated or zero without saying so in memory.
    """
    return library(x.dtype) is not None and all(
        t is None
        or (
            type(t) in (Tensor, nn.Parameter)
            and t.device.type == "cpu"
            and not (t.is_neg() or t._is_zerotensor())
        )
        for t in (x, *others)
    )


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
    """As `plain.forward`; moves running statistics too if it can."""
    y = torch.empty_like(x)
    dense, out = workable(x, y)
    ghosts = len(ghost_sizes(x.shape[0], ghost))
    table = x.new_empty(3, ghosts, x.shape[1], dtype=statistics_dtype(x))
    tensors = {"out": out, "weight": weight, "bias": bias}
    how = 0 if activation is None else RELU
    if residual is not None:
        tensors["other"] = as_dense_as(dense, residual)
        how |= OTHER
    if moving is None or not moving.suit(table.dtype):
        _call("forward", None, dense, table, ghost, how, eps, tensors)
    else:
        _call("forward", _moving(moving), dense, table, ghost, how, eps, tensors)
        moving.have_moved()
    if out is not y:
        y.copy_(out)
    return y, table


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
    """As `plain.backward`."""
    dx = torch.empty_like(x)
    dense, out = workable(x, dx)
    parameters = statistics.new_empty(2, x.shape[1])
    tensors = {"out": out, "weight": weight, "bias": bias, "other": as_dense_as(dense, dy)}
    how = OTHER | SCALED
    passed = x.new_empty(0)
    if activation == "relu" and y is not None:
        passed = torch.empty_like(out)
        tensors |= {"mask": as_dense_as(dense, y), "passed": passed}
        how |= BY_RESULT | PASSED
    elif activation == "relu":
        how |= BY_INPUT
    _call(
        "backward",
        ctypes.c_void_p(parameters.data_ptr()),
        dense,
        statistics,
        ghost,
        how,
        0.0,
        tensors,
    )
    if out is not dx:
        dx.copy_(out)
        passed = torch.empty_like(x).copy_(passed) if passed.numel() else passed
    return dx, parameters, passed


def _call(
    name: str,
    last: Any,
    x: Tensor,
    table: Tensor,
    ghost: int,
    how: int,
    eps: float,
    tensors: dict[str, Tensor | None],
) -> None:
    """Call a kernel on a batch that is dense, in rows or in planes."""
    samples, channels = x.shape[:2]
    pixels = x.numel() // (samples * channels)
    rows, pixels = (pixels, 1) if in_rows(x) else (1, pixels)
    ghosts, threads = table.shape[1], torch.get_num_threads()
    padded = -(-channels // PADDED) * PADDED
    room = x.new_empty(2 * (threads * ROOM + ghosts) * padded, dtype=torch.float64)
    tensors |= {"x": x, "statistics": table, "room": room}
    for parameter in ("weight", "bias"):
        if (values := tensors.get(parameter)) is not None:
            tensors[parameter] = values.to(table.dtype).contiguous()
    work = Work(
        **{name: tensor.data_ptr() for name, tensor in tensors.items() if tensor is not None},
        **{
            "values": x.numel(),
            "samples": samples,
            "rows": rows,
            "channels": channels,
            "pixels": pixels,
        },
        **{"ghost": ghost, "ghosts": ghosts, "threads": threads, "eps": eps, "how": how},
    )
    getattr(library(x.dtype), name)(ctypes.byref(work), last)


def _moving(buffers: Buffers) -> Any:
    return ctypes.byref(
        Moving(
            mean=buffers.mean.data_ptr(),
            variance=buffers.var.data_ptr(),
            tracked=None if buffers.tracked is None else buffers.tracked.data_ptr(),
            momentum=buffers.momentum,
            at_once=buffers.running == "mean",
        )
    )
