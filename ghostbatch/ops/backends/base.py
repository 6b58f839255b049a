"""What a backend is, and the records of a call that every backend takes."""

import os
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from ghostbatch.ops.backends.layouts import as_dense_as, make_dense
from ghostbatch.ops.reference import ghost_count
from ghostbatch.ops.running.stats import RunningStats

SWITCH = "GHOSTBATCH_KERNELS"
"""Environment variable. With 0 all kernels are off. With "interpret" those for CUDA run on CPU
tensors, in Triton's interpreter, for tests; TRITON_INTERPRET=1 must be set before Triton is
imported."""


def triton_takes(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether Triton kernels take such tensors: on an NVIDIA GPU, or interpreted on a CPU.

    A GPU with HIP has other caches and wavefronts of 64: nobody has measured there.
    """
    mode = os.environ.get(SWITCH)
    on_gpu = device.type == "cuda" and torch.version.hip is None and mode != "0"
    interpreted = device.type == "cpu" and mode == "interpret"
    return (on_gpu or interpreted) and dtype in (torch.bfloat16, torch.float16, torch.float32)


def has_triton(x: Tensor) -> bool:
    """Return whether Triton kernels may read this tensor now."""
    return (
        triton_takes(x.device, x.dtype)
        and type(x) is Tensor
        and not is_traced()
        and find_spec("triton") is not None
    )


def is_traced() -> bool:
    """Return whether a compiler, a tracer or torch.func needs to see PyTorch's own operations."""
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
        return True
    return inside_torch_func()


def inside_torch_func() -> bool:
    """Return whether a torch.func transform (grad, vmap, jvp, ...) is active."""
    return not torch.compiler.is_compiling() and (
        torch._C._functorch.peek_interpreter_stack() is not None
    )


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Make ``device`` the current one, on which Triton launches."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


class NormCall(NamedTuple):
    """One call of ghost norm in training: the arguments of the forward operator, in its order."""

    x: Tensor
    """(N, C, ...)."""
    weight: Tensor | None
    """(C,), as is the bias."""
    bias: Tensor | None
    ghost: int
    eps: float
    activation: str | None = None
    residual: Tensor | None = None
    """Shaped as x; added before the activation. Backward does not need it."""

    @property
    def ghosts(self) -> int:
        """Number of ghosts in the batch."""
        return ghost_count(self.x.shape[0], self.ghost)

    @property
    def statistics_dtype(self) -> torch.dtype:
        """fp32 for half-precision inputs, otherwise the dtype of the input."""
        return torch.promote_types(self.x.dtype, torch.float32)


class Backward(NamedTuple):
    """What backward reads besides the call, and the gradients it writes."""

    statistics: Tensor
    """Of the forward, (3, K, C)."""
    dy: Tensor
    y: Tensor | None
    """The result, if ReLU's mask is taken from it instead of being recomputed from x."""
    dx: Tensor
    dresidual: Tensor | None
    """Gradient of the residual: dy, but 0 where y is 0. Given if and only if y is."""
    dparameters: Tensor
    """Gradients of weight and bias, (2, C)."""
    other: Tensor | None = None
    """A second gradient of the result; given only to a backend that ``adds_gradients``."""


class Backend(ABC):
    """Computes ghost norm and its gradients on some devices, for some dtypes.

    Statistics are one tensor (3, K, C), for K ghosts: mean, 1 / sqrt(biased variance + eps), and
    unbiased variance. `normalise` and `differentiate` are given tensors that are dense, all with
    the strides of x, in rows or in planes (see `layouts`).
    """

    name: ClassVar[str]
    """As messages call it."""
    key: ClassVar[str]
    """As `backend_name` returns it, and run.json records it."""
    recomputes_relu_mask: ClassVar[bool] = True
    """Whether backward finds ReLU's mask from x. If not, or with a residual, autograd saves y."""

    adds_gradients: ClassVar[bool] = False
    """Whether `differentiate` adds a second gradient of the result itself."""

    @abstractmethod
    def available(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Return whether it runs on tensors of this device and dtype."""

    def supports(self, call: NormCall) -> bool:
        """Return whether it can take this call, on a device and dtype for which it is available."""
        del call
        return True

    def prepare(self, device: torch.device) -> None:  # noqa: B027 (most have nothing to prepare)
        """Allocate what outlives a call. Only eager code calls this, before the forward."""

    @abstractmethod
    def normalise(
        self, call: NormCall, y: Tensor, statistics: Tensor, running: RunningStats | None
    ) -> None:
        """Write ``activation(norm(x) + residual)`` to ``y``, and the ghosts' statistics.

        Also update the running statistics and mark them as updated, if the backend can.
        """

    @abstractmethod
    def differentiate(self, call: NormCall, grads: Backward) -> None:
        """Write the gradients.

        With xhat = (x - mean) invstd and means over the ghost,
        dx = weight invstd (dy - mean(dy) - xhat mean(dy xhat)). If ReLU follows, dy is 0 where its
        result is 0.
        """

    def update_running(self, running: RunningStats, moments: Tensor) -> bool:
        """Update the statistics with the ghosts' (2, K, C); return whether a kernel did it."""
        del running, moments
        return False

    def forward(self, call: NormCall, running: RunningStats | None = None) -> tuple[Tensor, Tensor]:
        """Return y, laid out as x, and the statistics."""
        y = torch.empty_like(call.x)
        x, out = make_dense(call.x, y)
        if call.residual is not None or x is not call.x:
            call = call._replace(x=x, residual=as_dense_as(x, call.residual))
        shape = (3, call.ghosts, x.shape[1])
        statistics = torch.empty(shape, dtype=call.statistics_dtype, device=x.device)
        self.normalise(call, out, statistics, running)
        return (y if out is y else y.copy_(out)), statistics

    def backward(
        self,
        call: NormCall,
        statistics: Tensor,
        dy: Tensor,
        y: Tensor | None = None,
        other: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of x, of weight and bias (2, C), and of the residual.

        The last one is empty unless ``y`` is given. ``other`` is a second gradient of the result.
        """
        if other is not None and not self.adds_gradients:
            dy, other = dy + other, None
        dx = torch.empty_like(call.x)
        x, out = make_dense(call.x, dx)
        if x is not call.x:
            call = call._replace(x=x)
        passed = None if y is None else torch.empty_like(out)
        dparameters = statistics.new_empty(2, x.shape[1])
        dy, y, other = as_dense_as(x, dy), as_dense_as(x, y), as_dense_as(x, other)
        self.differentiate(call, Backward(statistics, dy, y, out, passed, dparameters, other))
        if passed is None:
            passed = x.new_empty(0)
        elif out is not dx:
            passed = torch.empty_like(dx).copy_(passed)
        return (dx if out is dx else dx.copy_(out)), dparameters, passed
