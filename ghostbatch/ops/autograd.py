"""Ghost norm for autograd: a function for eager code, and operators for compilers.

With the operators ``torch.compile`` sees one node instead of a loop over ghosts. Either way
autograd saves the input and a few numbers per channel.
"""

from typing import Any

import torch
from torch import Tensor

from ghostbatch.ops.backends.base import NormCall
from ghostbatch.ops.backends.select import attempt, has_kernels, select, update_by_kernel
from ghostbatch.ops.reference import ghost_batch_norm_reference
from ghostbatch.ops.running.exchange import (
    exchange_after_backward,
    update_running,
    updates_in_forward,
)
from ghostbatch.ops.running.stats import RunningStats

Gradients = tuple[Tensor | None, ...]


def ghost_norm(
    call: NormCall, running: RunningStats | None = None, twice: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``activation(norm(x) + residual)``, the ghosts' statistics (3, K, C), and a second y.

    With ``twice`` the second y has the memory of the first and a gradient of its own, so that the
    backward can add the two gradients; otherwise it is the first.

    Eager code calls the function, which costs a tenth of a millisecond less than the operator and
    may update running statistics. Compilers and tensor subclasses need the operator.
    """
    if torch.compiler.is_compiling() or type(call.x) is not Tensor:
        y, statistics = ghost_norm_op(*call)
        return y, statistics, y
    y, statistics, *second = GhostNorm.apply(*call, running, twice)  # type: ignore[no-untyped-call]
    return y, statistics, second[0] if second else y


class GhostNorm(torch.autograd.Function):
    """Ghost norm for eager code. Inputs: those of a `NormCall`, `RunningStats`, and ``twice``."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:
        """Select a backend, which backward uses again, and return y and the statistics."""
        *arguments, running, twice = inputs
        call = NormCall(*arguments)
        backend = select(call)
        backend.prepare(call.x.device)
        ctx.backend, output = attempt(backend, lambda chosen: chosen.forward(call, running))
        ctx.mark_non_differentiable(output[1])
        _save(ctx, call, output, ctx.backend.recomputes_relu_mask)
        if not twice:
            return output
        y, statistics = output
        return y, statistics, y.detach()  # which shares y's memory and version

    @staticmethod
    def backward(
        ctx: Any, dy: Tensor | None, _: Tensor | None, other: Tensor | None = None
    ) -> Gradients:
        """Return a gradient for each input, given those of the results."""
        if dy is None:
            dy, other = other, None
        return *_gradients(ctx, dy, other), None, None


def _save(
    ctx: Any, call: NormCall, output: tuple[Tensor, Tensor], recomputes_relu_mask: bool
) -> None:
    """Save what backward needs: y only if it cannot recompute the ReLU mask from x."""
    y, statistics = output
    needs_y = call.activation and (call.residual is not None or not recomputes_relu_mask)
    ctx.save_for_backward(call.x, call.weight, call.bias, statistics, y if needs_y else None)
    ctx.ghost, ctx.eps, ctx.activation = call.ghost, call.eps, call.activation
    ctx.has_residual = call.residual is not None
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, dy: Tensor | None, other: Tensor | None = None) -> Gradients:
    """Return the gradients of the arguments of a `NormCall`, given one or two of its result."""
    x, weight, bias, statistics, y = ctx.saved_tensors
    exchange_after_backward()
    if dy is None:
        return (None,) * len(NormCall._fields)
    by_operator = ctx.backend is None or type(dy) is not Tensor
    passes_all = ctx.has_residual and ctx.activation is None  # the residual's gradient is their sum
    if other is not None and (torch.is_grad_enabled() or by_operator or passes_all):
        dy, other = dy + other, None
    if torch.is_grad_enabled():
        dx, dweight, dbias, passed = _differentiably(ctx, dy, x, weight, bias, y)
        return dx, dweight, dbias, None, None, None, passed
    if by_operator:
        dx, dparameters, passed = ghost_norm_backward_op(
            dy, x, weight, statistics, ctx.ghost, ctx.activation, bias, y
        )
    else:
        call = NormCall(x, weight, bias, ctx.ghost, ctx.eps, ctx.activation)
        _, (dx, dparameters, passed) = attempt(
            ctx.backend, lambda backend: backend.backward(call, statistics, dy, y, other)
        )
    dweight, dbias = (
        None if parameter is None else gradient.to(parameter.dtype)
        for parameter, gradient in zip((weight, bias), dparameters, strict=True)
    )
    if not ctx.has_residual:
        passed = None
    elif ctx.activation is None:
        passed = dy
    return dx, dweight, dbias, None, None, None, passed


def _differentiably(
    ctx: Any, dy: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, y: Tensor | None
) -> list[Tensor | None]:
    """Return the gradients of x, weight, bias and residual with a graph, for double backward.

    Views replace the inputs, so these are partial derivatives even if one input depends on another.
    """
    x = x.view_as(x)
    weight, bias = (None if t is None else t.view_as(t) for t in (weight, bias))
    inputs = (x, weight, bias)
    wanted = [t for t in inputs if t is not None and t.requires_grad]
    norm = ghost_batch_norm_reference(x, None, None, weight, bias, ghost=ctx.ghost, eps=ctx.eps)
    if ctx.activation:
        dy = dy.where((norm if y is None else y) > 0, 0)
    grads = iter(torch.autograd.grad(norm, wanted, dy, create_graph=True)) if wanted else iter(())
    partial = [next(grads) if t is not None and t.requires_grad else None for t in inputs]
    return [*partial, dy if ctx.has_residual else None]


# Compilers keep code that calls the operators in caches on disk: names and order of their arguments
# must not change.


@torch.library.custom_op("ghostbatch::ghost_norm", mutates_args=())
def ghost_norm_op(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    ghost: int,
    eps: float,
    activation: str | None = None,
    residual: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """As `ghost_norm`, with the backend selected when it runs."""
    call = NormCall(x, weight, bias, ghost, eps, activation, residual)
    return attempt(select(call), lambda backend: backend.forward(call))[1]


@torch.library.custom_op("ghostbatch::ghost_norm_backward", mutates_args=())
def ghost_norm_backward_op(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    statistics: Tensor,
    ghost: int,
    activation: str | None = None,
    bias: Tensor | None = None,
    y: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `Backend.backward`, with the backend selected when it runs."""
    call = NormCall(x, weight, bias, ghost, 0.0, activation)
    return attempt(select(call), lambda backend: backend.backward(call, statistics, dy, y))[1]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    call = NormCall(*inputs)
    ctx.backend = None
    _save(ctx, call, output, recomputes_relu_mask=has_kernels(call.x))


ghost_norm_op.register_autograd(
    lambda ctx, dy, _: _gradients(ctx, dy), setup_context=_setup_context
)


@ghost_norm_op.register_fake
def _(
    x: Tensor, weight: object, bias: object, ghost: int, *_: object, **__: object
) -> tuple[Tensor, Tensor]:
    del weight, bias
    call = NormCall(x, None, None, ghost, 0.0)
    shape = (3, call.ghosts, x.shape[1])
    return torch.empty_like(x), x.new_empty(shape, dtype=call.statistics_dtype)


@ghost_norm_backward_op.register_fake
def _(
    dy: object,
    x: Tensor,
    weight: object,
    statistics: Tensor,
    ghost: object,
    activation: object = None,
    bias: object = None,
    y: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    del dy, weight, ghost, activation, bias
    dresidual = x.new_empty(0) if y is None else torch.empty_like(x)
    return torch.empty_like(x), statistics.new_empty(2, x.shape[1]), dresidual


@torch.library.custom_op(
    "ghostbatch::update_running",
    mutates_args=("running_mean", "running_var", "num_batches_tracked"),
)
def update_running_op(
    running_mean: Tensor,
    running_var: Tensor,
    num_batches_tracked: Tensor | None,
    statistics: Tensor,
    momentum: float | None,
    running: str,
    group: str | None,
) -> None:
    """As `update_running`, with the ghosts' means and variances as ``statistics``.

    The buffers may be copies that live only as long as the call, so nothing can be left pending:
    ranks exchange their contributions at once, layer by layer.
    """
    stats = RunningStats(running_mean, running_var, num_batches_tracked, momentum, running)
    if not (updates_in_forward(group) and update_by_kernel(stats, statistics)):
        update_running(stats, statistics, group, defer=False)


@update_running_op.register_fake
def _(*_: object) -> None:
    """Return nothing."""
