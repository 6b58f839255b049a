"""The Triton backend: launches the kernels. Triton is imported when the first call arrives."""

import math
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ghostbatch.ops.backends.base import Backend, Backward, NormCall, on_device, triton_takes
from ghostbatch.ops.backends.layouts import in_rows, is_readable
from ghostbatch.ops.backends.triton.counters import counters, make_store
from ghostbatch.ops.backends.triton.tiling import TilePlan, cdiv, make_plan, power_of_two, tuning
from ghostbatch.ops.running.stats import RunningStats


class TritonBackend(Backend):
    """One kernel forward, which also updates running statistics, and one backward."""

    name = "the Triton kernels"
    key = "triton"
    adds_gradients = True

    def available(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Return whether this is an NVIDIA GPU or the interpreter, and a supported dtype."""
        return triton_takes(device, dtype)

    def supports(self, call: NormCall) -> bool:
        """Return whether the tensors can be read as memory, and offsets fit in 32 bits."""
        _kernels()  # raises where Triton cannot be imported
        tensors = (call.x, call.weight, call.bias, call.residual)
        return is_readable(*tensors) and plan_for(call, backward=False).largest_offset < 2**31

    def prepare(self, device: torch.device) -> None:
        """Make the store of counters for CUDA graphs."""
        make_store(device)

    def normalise(
        self, call: NormCall, y: Tensor, statistics: Tensor, running: RunningStats | None
    ) -> None:
        """As `Backend.normalise`."""
        if running is not None and not running.supports_fused_update(torch.float32):
            running = None
        _launch(
            _kernels().forward_kernel,
            plan_for(call, backward=False, residual=call.residual is not None),
            x_ptr=call.x,
            residual_ptr=_or(call.residual, call.x),
            y_ptr=y,
            weight_ptr=_or(call.weight, call.x),
            bias_ptr=_or(call.bias, call.x),
            statistics_ptr=statistics,
            eps=call.eps,
            **_running_arguments(running, statistics),
            WEIGHT=call.weight is not None,
            BIAS=call.bias is not None,
            UPDATE_RUNNING=running is not None,
            RESIDUAL=call.residual is not None,
            RELU=call.activation == "relu",
        )
        if running is not None:
            running.mark_updated()

    def differentiate(self, call: NormCall, grads: Backward) -> None:
        """As `Backend.differentiate`."""
        _launch(
            _kernels().backward_kernel,
            plan_for(call, backward=True, residual=grads.y is not None),
            dy_ptr=grads.dy,
            other_ptr=_or(grads.other, call.x),
            x_ptr=call.x,
            y_ptr=_or(grads.y, call.x),
            dx_ptr=grads.dx,
            dresidual_ptr=_or(grads.dresidual, call.x),
            weight_ptr=_or(call.weight, call.x),
            bias_ptr=_or(call.bias, call.x),
            statistics_ptr=grads.statistics,
            sums_ptr=torch.empty_like(grads.statistics[:2]),
            dparameters_ptr=grads.dparameters,
            WEIGHT=call.weight is not None,
            BIAS=call.bias is not None,
            RESIDUAL=grads.y is not None,
            RELU=call.activation == "relu",
            JOINED=grads.other is not None,
        )

    def update_running(self, running: RunningStats, moments: Tensor) -> bool:
        """As `Backend.update_running`, for fp32."""
        if moments.dtype != torch.float32 or not moments[0].is_contiguous():
            return False
        if not running.supports_fused_update(torch.float32):
            return False
        from ghostbatch.ops.backends.triton.running import running_kernel  # noqa: PLC0415

        _, ghosts, channels = moments.shape
        block = min(power_of_two(channels), 32)
        with on_device(moments.device):
            running_kernel[(cdiv(channels, block),)](
                **_running_arguments(running, moments),
                moments_ptr=moments,
                moments_stride=moments.stride(0),
                ghosts=ghosts,
                C=channels,
                R=min(power_of_two(ghosts), 64),
                BC=block,
            )
        running.mark_updated()
        return True


@cache
def _kernels() -> ModuleType:
    from ghostbatch.ops.backends.triton import kernels  # noqa: PLC0415 (imports triton)

    return kernels


def plan_for(call: NormCall, *, backward: bool, residual: bool = False) -> TilePlan:
    """Return the tile plan for a batch in rows or in planes."""
    x, planes = call.x, not in_rows(call.x)
    shape = tuple(x.shape)
    settings = tuning(shape, x.dtype, planes, backward, call.ghost, residual)
    return make_plan(shape, x.dtype, planes, call.ghost, settings, _multiprocessors(x.device))


@cache
def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _running_arguments(running: RunningStats | None, moments: Tensor) -> dict[str, Any]:
    """Return the kernels' arguments for the update of running statistics, by name.

    K updates in a row are one (see `running.update`). Without running statistics the kernel reads
    none of these arguments.
    """
    if running is None:
        running = RunningStats(moments, moments, None, 0.0, "mean")
    momentum, ghosts = running.momentum or 0.0, moments.shape[1]
    decay, by_mean = 1 - momentum, running.policy == "mean"
    log_decay = math.log2(decay) if decay > 0 else -1e30
    return {
        "mean_ptr": running.mean,
        "var_ptr": running.var,
        "tracked_ptr": _or(running.num_batches_tracked, running.mean),
        "tracked_step": 1 if by_mean else ghosts,
        "kept": decay if by_mean else decay**ghosts,
        "rate": momentum / ghosts if by_mean else momentum,
        "log_decay": 0.0 if by_mean else log_decay,
        "TRACKED": running.num_batches_tracked is not None,
    }


def _or(tensor: Tensor | None, unused: Tensor) -> Tensor:
    """Return ``tensor``, or ``unused`` as a placeholder that the kernel never reads."""
    if tensor is None:
        return unused
    return tensor.contiguous() if tensor.dim() == 1 else tensor


def _launch(kernel: Any, plan: TilePlan, **arguments: Any) -> None:
    """Launch a kernel with these arguments, those of the plan, scratch space and counters."""
    device = arguments["x_ptr"].device
    with on_device(device):
        kernel[(plan.grid,)](
            partial_sums_ptr=torch.empty(plan.partial_sums, dtype=torch.float32, device=device),
            counters_ptr=counters(device, plan.counters),
            **arguments,
            **plan.arguments,
        )
