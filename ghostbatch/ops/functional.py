"""The public ghost batch norm function: checks its arguments, then takes the best path.

The work is done by operators registered with PyTorch, so that ``torch.compile`` sees one node where
there would be a loop over ghosts, and autograd saves the input and a few numbers per channel.
"""

import warnings
from typing import Any, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from ghostbatch.ops import paths, plain
from ghostbatch.ops.buffers import Buffers
from ghostbatch.ops.counters import make_store
from ghostbatch.ops.ranks import LOCAL, Group, ranks_in
from ghostbatch.ops.reference import (
    ACTIVATIONS,
    Activation,
    Running,
    ghost_batch_norm_reference,
    ghost_sizes,
    values_per_channel,
)
from ghostbatch.ops.running import (
    movable_now,
    settle_after_backward,
    update_running,
    update_running_op,
)


def ghost_batch_norm(
    x: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    ghost: int = 128,
    training: bool = True,
    momentum: float | None = 0.1,
    eps: float = 1e-5,
    running: Running = "sequential",
    num_batches_tracked: Tensor | None = None,
    activation: Activation | None = None,
    residual: Tensor | None = None,
    group: Group = LOCAL,
) -> Tensor:
    """Batch normalisation over ghosts of ``ghost`` consecutive samples.

    In training each ghost of ``x`` (N, C, ...) is normalised with its own mean and biased
    variance, and the running statistics move in place: one exponential update per ghost, in order
    (``running="sequential"``), or one update with the mean over ghosts (``running="mean"``).
    ``momentum=None`` keeps a cumulative average and needs ``num_batches_tracked``. Otherwise the
    running statistics are used, as ``torch.nn.functional.batch_norm`` does.

    The result is ``activation(norm(x) + residual)``. ``group`` names the ranks that share the
    running statistics (see `ops.running`); by default none do.
    """
    check_options(ghost, running, activation)
    _check_tensors(
        x,
        running_mean=running_mean,
        running_var=running_var,
        weight=weight,
        bias=bias,
        num_batches_tracked=num_batches_tracked,
    )
    if residual is not None and residual.shape != x.shape:
        raise ValueError(
            f"residual should be of size {tuple(x.shape)}, got {tuple(residual.shape)}"
        )
    if not training or x.numel() == 0:
        # Without running statistics the whole batch's are used, as PyTorch does.
        whole = training or running_mean is None
        y = F.batch_norm(x, running_mean, running_var, weight, bias, whole, momentum or 0.0, eps)
    else:
        smallest = min(ghost_sizes(x.shape[0], ghost))
        if smallest == 1 and values_per_channel(x[:1]) == 1:
            raise ValueError(
                "Expected more than 1 value per channel when training, "
                f"got a ghost of size {(1, *x.shape[1:])}"
            )
        if momentum is None and running_mean is not None and num_batches_tracked is None:
            raise ValueError("momentum=None (a cumulative average) needs num_batches_tracked")
        if _inside_torch_func():  # torch.func sees through plain operations only
            return ghost_batch_norm_reference(
                *(x, running_mean, running_var, weight, bias),
                ghost=ghost,
                momentum=momentum,
                eps=eps,
                running=running,
                num_batches_tracked=num_batches_tracked,
                activation=activation,
                residual=residual,
            )
        fuses = residual is None or residual.dtype == x.dtype
        rest = (activation, residual) if fuses else (None, None)
        if running_mean is None or running_var is None:
            y, _ = ghost_norm(x, weight, bias, ghost, eps, *rest)
        elif torch.compiler.is_compiling():
            y, statistics = ghost_norm(x, weight, bias, ghost, eps, *rest)
            moving = (running_mean, running_var, num_batches_tracked)
            update_running_op(*moving, statistics.detach()[::2], momentum, running, group)
        else:
            _warn_of_uneven_ghosts(x.shape[0], ghost, group)
            buffers = Buffers(running_mean, running_var, num_batches_tracked, momentum, running)
            may_move = movable_now(buffers, group)
            y, statistics = ghost_norm(x, weight, bias, ghost, eps, *rest, may_move)
            if not buffers.moved:
                statistics = statistics.detach() if statistics.requires_grad else statistics
                update_running(buffers, statistics[::2], group)
        residual, activation = (None, None) if fuses else (residual, activation)
    if residual is not None:
        y = y + residual
    return ACTIVATIONS[activation](y)


def _inside_torch_func() -> bool:
    """Whether a transform of torch.func (grad, vmap, jvp, ...) is at work."""
    return not torch.compiler.is_compiling() and (
        torch._C._functorch.peek_interpreter_stack() is not None
    )


def _warn_of_uneven_ghosts(samples: int, ghost: int, group: Group) -> None:
    if samples % ghost and ranks_in(group) > 1:
        warnings.warn(
            f"this rank's {samples} samples are no multiple of the ghost size {ghost}, so the "
            "ghosts are not those of the whole batch on one rank; choose sizes that divide",
            stacklevel=4,
        )


def check_options(
    ghost: int, running: Running = "sequential", activation: Activation | None = None
) -> None:
    """Refuse options that are none."""
    if isinstance(ghost, bool) or not isinstance(ghost, int) or ghost < 1:
        raise ValueError(f"ghost must be a positive integer, got {ghost!r}")
    if running not in get_args(Running):
        raise ValueError(f"running must be one of {get_args(Running)}, got {running!r}")
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {tuple(ACTIVATIONS)}, got {activation!r}")


def _check_tensors(x: Tensor, **others: Tensor | None) -> None:
    """Refuse what PyTorch's batch norm refuses, in words like its own."""
    if not x.is_floating_point():
        raise TypeError(f"x must be a real floating-point tensor, got {x.dtype}")
    if x.dim() < 2:
        raise ValueError(f"expected x of at least 2 dimensions (N, C, ...), got {x.dim()}D input")
    for name, tensor in others.items():
        if tensor is None:
            continue
        if name != "num_batches_tracked" and tensor.numel() != x.shape[1]:
            raise RuntimeError(f"{name} should contain {x.shape[1]} elements not {tensor.numel()}")
        if tensor.device != x.device:
            raise RuntimeError(
                "Expected all tensors to be on the same device, "
                f"but found x on {x.device} and {name} on {tensor.device}"
            )


# ---------------------------------------------------------------------------------------- autograd


def ghost_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    ghost: int,
    eps: float,
    activation: str | None = None,
    residual: Tensor | None = None,
    moving: Buffers | None = None,
) -> tuple[Tensor, Tensor]:
    """``activation(norm(x) + residual)``, and the ghosts' `Statistics` as one tensor (3, K, C).

    The operator and the autograd function are the same; the function costs a tenth of a
    millisecond less per call, the operator is what compilers and fake tensors understand. Only the
    function may move running statistics, and says so in them.
    """
    inputs = (x, weight, bias, ghost, eps, activation, residual)
    if torch.compiler.is_compiling() or type(x) is not Tensor:
        result: tuple[Tensor, Tensor] = ghost_norm_op(*inputs)
        return result
    return GhostNorm.apply(*inputs, moving)  # type: ignore[no-any-return, no-untyped-call]


class GhostNorm(torch.autograd.Function):
    """Ghost norm for eager code."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        """As `paths.forward`."""
        if paths.triton_serves(inputs[0]):
            make_store(inputs[0].device)
        output = paths.forward(*inputs)
        ctx.mark_non_differentiable(output[1])
        GhostNorm.save(ctx, inputs, output)
        return output

    @staticmethod
    def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        """Save the input and a few numbers per channel.

        What ReLU let pass is told by its result, which the next layer keeps anyway; without a
        residual the kernels tell it from the input. PyTorch's ``setup_context`` would do for
        calling this, but costs as much as a small layer.
        """
        x, weight, bias, ctx.ghost, ctx.eps, ctx.activation, residual, *_ = inputs
        by_result = ctx.activation and (residual is not None or not paths.kernels_serve(x))
        ctx.save_for_backward(x, weight, bias, output[1], output[0] if by_result else None)
        ctx.has_residual = residual is not None
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
        """As `paths.backward`, or in differentiable steps where grad mode is on.

        Autograd ignores the last one where there was no eighth input.
        """
        x, weight, bias, statistics, y = ctx.saved_tensors
        settle_after_backward()
        if dy is None:
            return (None,) * 8
        if torch.is_grad_enabled():
            *grads, passed = _differentiably(ctx, dy, x, weight, bias, y)
            return *grads, None, None, None, passed, None
        compute = paths.backward if type(dy) is Tensor else ghost_norm_backward_op
        dx, parameters, passed = compute(
            dy, x, weight, statistics, ctx.ghost, ctx.activation, bias, y
        )
        dweight, dbias = (
            None if parameter is None else gradient.to(parameter.dtype)
            for parameter, gradient in zip((weight, bias), parameters, strict=True)
        )
        if not ctx.has_residual:
            passed = None
        elif ctx.activation is None:
            passed = dy
        return dx, dweight, dbias, None, None, None, passed, None


def _differentiably(
    ctx: Any, dy: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, y: Tensor | None
) -> list[Tensor | None]:
    """The same gradients as functions of the inputs, for those who want second derivatives.

    They are partial ones: views keep them apart where one input depends on another.
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


# --------------------------------------------------------------------------------------- operators


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
    """`paths.forward`, for compilers; running statistics are another operator's."""
    return paths.forward(x, weight, bias, ghost, eps, activation, residual)


ghost_norm_backward_op = torch.library.custom_op(
    "ghostbatch::ghost_norm_backward", paths.backward, mutates_args=()
)
ghost_norm_op.register_autograd(GhostNorm.backward, setup_context=GhostNorm.save)


@ghost_norm_op.register_fake
def _(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    ghost: int,
    eps: float,
    activation: str | None = None,
    residual: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    del weight, bias, eps, activation, residual
    shape = (3, len(ghost_sizes(x.shape[0], ghost)), x.shape[1])
    return torch.empty_like(x), x.new_empty(shape, dtype=plain.statistics_dtype(x))


@ghost_norm_backward_op.register_fake
def _(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    statistics: Tensor,
    ghost: int,
    activation: str | None = None,
    bias: Tensor | None = None,
    y: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    del dy, weight, ghost, bias
    passed = activation == "relu" and y is not None
    dresidual = torch.empty_like(x) if passed else x.new_empty(0)
    return torch.empty_like(x), statistics.new_empty(2, x.shape[1]), dresidual
