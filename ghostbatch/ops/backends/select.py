"""Selects the backend of a call, once, and falls back to tensor code when one breaks.

GHOSTBATCH_KERNELS=0 turns all kernels off. GHOSTBATCH_KERNELS=interpret runs those for CUDA on CPU
tensors in Triton's interpreter, for tests (TRITON_INTERPRET=1 must be set, too, before Triton is
imported).
"""

import os
import warnings
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from ghostbatch.ops.backends.base import Backend, NormCall
from ghostbatch.ops.backends.c.bind import CBackend
from ghostbatch.ops.backends.tensor import TensorBackend
from ghostbatch.ops.backends.triton.launch import TritonBackend
from ghostbatch.ops.running.stats import RunningStats

Result = TypeVar("Result")

SWITCH = "GHOSTBATCH_KERNELS"
BACKENDS: tuple[Backend, ...] = (TritonBackend(), CBackend(), TensorBackend())
"""In order of preference; the last one takes every call."""

TENSOR = BACKENDS[-1]
_broken: set[Backend] = set()


def select(call: NormCall) -> Backend:
    """Return the first backend that supports a call, by its device, dtype, tensors and sizes."""
    return _first(call.x, lambda backend: backend.supports(call))


def has_kernels(x: Tensor) -> bool:
    """Whether there are kernels for the device and dtype of ``x``."""
    return _first(x, lambda _: True) is not TENSOR


def attempt(backend: Backend, work: Callable[[Backend], Result]) -> tuple[Backend, Result]:
    """Return a backend and ``work(backend)``: the given one or, if that breaks, tensor code."""
    if backend is not TENSOR:
        try:
            return backend, work(backend)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            result = work(TENSOR)  # if this fails as well, the backend is not to blame
            _give_up(backend, error)
            return TENSOR, result
    return TENSOR, work(TENSOR)


def update_running(running: RunningStats, moments: Tensor) -> bool:
    """Update running statistics by the ghosts' (2, K, C) if a kernel can; return whether it did."""
    backend = _first(moments, lambda _: True)
    return attempt(backend, lambda chosen: chosen.update_running(running, moments))[1]


def _first(x: Tensor, fits: Callable[[Backend], bool]) -> Backend:
    switch = os.environ.get(SWITCH, "1")
    if switch == "0":
        return TENSOR
    for backend in BACKENDS:
        if backend in _broken:
            continue
        try:
            if backend.available(x.device, x.dtype, switch == "interpret") and fits(backend):
                return backend
        except Exception as error:
            _give_up(backend, error)
    return TENSOR


def _give_up(backend: Backend, error: Exception) -> None:
    """Never select a broken backend again, and warn of that once."""
    if backend not in _broken:
        _broken.add(backend)
        warnings.warn(
            f"{backend.name} do not work here, so slower tensor code is used "
            f"({SWITCH}=0 asks for that): {type(error).__name__}: {error}",
            stacklevel=4,
        )
