"""Selects the backend of a call, and falls back to tensor code when one breaks.

Eager code selects once per call, and backward uses the same; compiled code once per operator.
"""

import os
import warnings
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from ghostbatch.ops.backends.base import SWITCH, Backend, NormCall
from ghostbatch.ops.backends.c.bind import CBackend
from ghostbatch.ops.backends.tensor import TensorBackend
from ghostbatch.ops.backends.triton.launch import TritonBackend
from ghostbatch.ops.running.stats import RunningStats

Result = TypeVar("Result")

BACKENDS: tuple[Backend, ...] = (TritonBackend(), CBackend(), TensorBackend())
"""In order of preference; the last one takes every call."""

TENSOR = BACKENDS[-1]
_broken: set[Backend] = set()


def select(call: NormCall) -> Backend:
    """Return the first backend that supports a call, by its device, dtype, tensors and sizes."""
    return _first(call.x, lambda backend: backend.supports(call))


def backend_name(device: torch.device, dtype: torch.dtype) -> str:
    """Return the name of the backend for a device and dtype: "triton", "c" or "tensor".

    Backends round differently. One that breaks at its first call is replaced only then.
    """
    x = torch.empty(2, 1, device=device, dtype=dtype)
    return select(NormCall(x, None, None, ghost=2, eps=1e-5)).key


def has_kernels(x: Tensor) -> bool:
    """Return whether there are kernels for the device and dtype of ``x``."""
    return _first(x, lambda _: True) is not TENSOR


def attempt(backend: Backend, work: Callable[[Backend], Result]) -> tuple[Backend, Result]:
    """Return the backend used and ``work(backend)``; tensor code replaces one that raises."""
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


def update_by_kernel(running: RunningStats, moments: Tensor) -> bool:
    """Update the statistics with the ghosts' (2, K, C); return whether a kernel did it."""
    backend = _first(moments, lambda _: True)
    return attempt(backend, lambda chosen: chosen.update_running(running, moments))[1]


def _first(x: Tensor, fits: Callable[[Backend], bool]) -> Backend:
    if os.environ.get(SWITCH) == "0":
        return TENSOR
    for backend in BACKENDS:
        if backend in _broken:
            continue
        try:
            if backend.available(x.device, x.dtype) and fits(backend):
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
            f"(set {SWITCH}=0 to choose it without this warning): {type(error).__name__}: {error}",
            stacklevel=4,
        )
