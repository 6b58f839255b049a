"""The public ghost batch norm function: argument checks, evaluation, and what follows the norm."""

import warnings
from typing import Any, get_args

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from ghostbatch.errors import InputError, check_choice
from ghostbatch.ops.autograd import ghost_norm, update_running_op
from ghostbatch.ops.backends.base import NormCall, inside_torch_func
from ghostbatch.ops.reference import (
    ACTIVATIONS,
    Activation,
    Running,
    ghost_batch_norm_reference,
    values_per_channel,
)
from ghostbatch.ops.running.exchange import (
    exchange_after_backward,
    update_running,
    updates_in_forward,
)
from ghostbatch.ops.running.groups import LOCAL, Group, ranks_in
from ghostbatch.ops.running.stats import UNNUMBERED, RunningStats


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
    number: int = UNNUMBERED,
    twice: bool = False,
) -> Tensor:
    """Normalise ghosts of ``ghost`` consecutive samples; return ``activation(norm(x) + residual)``.

    In training each ghost of ``x`` (N, C, ...) is normalised with its own mean and biased
    variance, and the running statistics are updated in place: one exponential update per ghost, in
    order (``running="sequential"``), or one with the mean over ghosts (``running="mean"``).
    ``momentum=None`` keeps a cumulative average and needs ``num_batches_tracked``. With
    ``training=False`` the running statistics are used, as in ``F.batch_norm``.

    Args:
        x: (N, C, ...).
        running_mean: (C,), updated in place in training; None keeps no statistics.
        running_var: (C,), the same.
        weight: (C,), the scale after the norm.
        bias: (C,), the shift after it.
        ghost: samples that are normalised together in training.
        training: normalise with the statistics of each ghost, not with the running ones.
        momentum: weight of the newest ghost in the running statistics.
        eps: added to the variance.
        running: how the running statistics are updated, see above.
        num_batches_tracked: counter of updates, a tensor with one element, raised in place.
        activation: "relu", or None.
        residual: a tensor like ``x``, added before the activation.
        group: ranks that share the running statistics; by default none do.
        number: identifies the layer in their exchange.
        twice: return a pair of tensors that share their memory, one for each of two layers that use
            the result. The backward then adds their two gradients while it reads them; autograd
            would add them with one more kernel.

    """
    check_options(ghost, running, activation)
    if not isinstance(momentum, int | float | None):
        raise InputError("momentum", f"{momentum!r} is not a number", "use 0.1, or None")
    tensors = {"weight": weight, "bias": bias, "num_batches_tracked": num_batches_tracked}
    _check_tensors(x, residual, running_mean=running_mean, running_var=running_var, **tensors)
    stats = None
    if training and running_mean is not None and running_var is not None:
        stats = RunningStats(
            running_mean, running_var, num_batches_tracked, momentum, running, number
        )
    if not training or x.numel() == 0:
        # Without running statistics those of the batch are used, as PyTorch does.
        by_batch = training or running_mean is None
        y = F.batch_norm(x, running_mean, running_var, weight, bias, by_batch, momentum or 0.0, eps)
        y = y if stats is None else _contribute_no_ghosts(y, stats, group)
        y = _add_and_activate(y, residual, activation)
        return (y, y) if twice else y  # type: ignore[return-value]
    if eps <= 0:
        raise ValueError(f"ghost_batch_norm eps must be positive during training, but got {eps}")
    if min(ghost, x.shape[0]) == 1 and values_per_channel(x[:1]) == 1:
        shape = (1, *x.shape[1:])
        raise ValueError(
            f"Expected more than 1 value per channel when training, got a ghost of size {shape}"
        )
    if momentum is None and running_mean is not None and num_batches_tracked is None:
        problem = "None is a cumulative average, which counts in num_batches_tracked"
        raise InputError("momentum", problem, "give that tensor, too")
    call = NormCall(x, weight, bias, ghost, eps, activation, residual)
    pair = _train(call, stats, group, twice)
    return pair if twice else pair[0]  # type: ignore[return-value]


def _train(
    call: NormCall, stats: RunningStats | None, group: Group, twice: bool = False
) -> tuple[Tensor, Tensor]:
    """Return ``activation(norm(x) + residual)`` twice; update the running statistics."""
    if inside_torch_func() or _has_tangent(call.x, call.weight, call.bias, call.residual):
        y = _reference(call, stats)
        return y, y
    if call.residual is not None and call.residual.dtype != call.x.dtype:
        # Backends need the residual in x's dtype, so it is added afterwards.
        plain = call._replace(activation=None, residual=None)
        y = _add_and_activate(_train(plain, stats, group)[0], call.residual, call.activation)
        return y, y
    if stats is None:
        y, _, second = ghost_norm(call, None, twice)
        return y, second
    if torch.compiler.is_compiling():
        y, statistics, second = ghost_norm(call)
        _update_compiled(stats, statistics.detach()[::2], group)
        return y, second
    ghost = call.ghost
    if call.x.shape[0] % ghost and ranks_in(group) > 1:
        warnings.warn(  # of the same text for every batch, so that Python shows it once
            f"this rank's batch is not a multiple of the ghost size {ghost}, so its ghosts differ "
            f"from those on one rank; use a batch per rank that {ghost} divides",
            stacklevel=4,
        )
    in_forward = stats if updates_in_forward(group) else None
    y, statistics, second = ghost_norm(call, in_forward, twice)
    if not stats.updated:
        update_running(stats, statistics.detach()[::2], group)
    return y, second


def _has_tangent(*tensors: Tensor | None) -> bool:
    """Return whether forward-mode differentiation follows one of these tensors."""
    if torch.compiler.is_compiling() or forward_ad._current_level < 0:  # of any thread
        return False
    return any(t is not None and forward_ad.unpack_dual(t).tangent is not None for t in tensors)


def _update_compiled(stats: RunningStats, moments: Tensor, group: Group) -> None:
    """Update the running statistics by an operator, as `update_running` does."""
    buffers = stats.mean, stats.var, stats.num_batches_tracked
    update_running_op(*buffers, moments, stats.momentum, stats.policy, group)


def _contribute_no_ghosts(y: Tensor, stats: RunningStats, group: Group) -> Tensor:
    """Return the empty y; take part in the exchange with other ranks, which may have samples."""
    if inside_torch_func() or ranks_in(group) == 1:
        return y
    dtype = torch.promote_types(y.dtype, torch.float32)
    moments = torch.zeros(2, 0, stats.mean.numel(), dtype=dtype, device=y.device)
    if torch.compiler.is_compiling():
        _update_compiled(stats, moments, group)
        return y
    update_running(stats, moments, group)
    if y.requires_grad:  # as the backward of a layer with ghosts does
        y.register_hook(lambda _: exchange_after_backward())
    return y


def _reference(call: NormCall, stats: RunningStats | None) -> Tensor:
    """Return what `_train` returns, by plain differentiable operations, as torch.func needs."""
    options: dict[str, Any] = call._asdict()
    if stats is not None:
        options |= {"running_mean": stats.mean, "running_var": stats.var, "running": stats.policy}
        options |= {"num_batches_tracked": stats.num_batches_tracked, "momentum": stats.momentum}
    return ghost_batch_norm_reference(**options)


def _add_and_activate(y: Tensor, residual: Tensor | None, activation: str | None) -> Tensor:
    return ACTIVATIONS[activation](y if residual is None else y + residual)


def check_options(
    ghost: int, running: Running = "sequential", activation: Activation | None = None
) -> None:
    """Refuse a ghost size, a policy or an activation that does not exist."""
    if isinstance(ghost, bool) or not isinstance(ghost, int) or ghost < 1:
        raise InputError("ghost", f"{ghost!r} is not a positive integer", "use 128, for example")
    check_choice("running", running, get_args(Running))
    if activation is not None:
        check_choice("activation", activation, [name for name in ACTIVATIONS if name])


def _check_tensors(x: Tensor, residual: Tensor | None, **others: Tensor | None) -> None:
    """Refuse what PyTorch's batch norm refuses, in similar words."""
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
    if residual is not None and residual.shape != x.shape:
        raise ValueError(
            f"residual should be of size {tuple(x.shape)}, got {tuple(residual.shape)}"
        )
