"""LARS and LAMB: optimizers that scale the step of each tensor of weights to its norm."""

from collections.abc import Callable
from math import inf, log
from typing import Any

import torch
from torch import Tensor

from ghostbatch.errors import InputError
from ghostbatch.optim.groups import Parameters, wide_dtype
from ghostbatch.optim.regime import check_rate
from ghostbatch.optim.scaling import check_betas

Group = dict[str, Any]
Tensors = list[Tensor] | tuple[Tensor, ...]
Change = tuple[Tensors, Tensors]
"""Tensors, and the values that they get."""


class Layerwise(torch.optim.Optimizer):
    """What LARS and LAMB share: a step computes all new values, and then writes them.

    A step does not wait for the device and can be part of a CUDA graph; the learning rate may be a
    tensor. If the attribute ``found_inf``, a tensor, is 1, the step changes nothing. All parameters
    of a group must be on one device. Groups with ``adapt=False`` are not scaled to their norms:
    pass ``norm_groups(model, adapt=False)``.
    """

    def __init__(self, params: Parameters, lr: float | Tensor, **options: Any) -> None:
        check_rate("lr", float(lr))
        check_rate("weight_decay", options["weight_decay"])
        # With capturable, PyTorch loads the state "step" to the device of the weights.
        super().__init__(params, {"lr": lr, "capturable": True, **options})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Change the weights that have a gradient; return what ``closure`` returns, if given."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        skip: Tensor | None = getattr(self, "found_inf", None)
        for group in self.param_groups:
            weights = [p for p in group["params"] if p.grad is not None]
            if weights:
                for old, new in self._changes(group, weights, [p.grad for p in weights]):
                    _write(old, new, skip)
        return loss

    def _changes(self, group: Group, weights: Tensors, gradients: Tensors) -> list[Change]:
        """Return the new weights and state of a group."""
        raise NotImplementedError

    def _kept(
        self, name: str, weights: Tensors, zero: Callable[[Tensor], Tensor] = torch.zeros_like
    ) -> Tensors:
        """Return the state of this name for all weights; it begins as ``zero(weight)``."""
        for weight in weights:
            if name not in self.state[weight]:
                self.state[weight][name] = zero(weight)
        return [self.state[weight][name] for weight in weights]


class LARS(Layerwise):
    """SGD with momentum and layer-wise rates (You, Gitman, Ginsburg 2017).

    For each tensor of weights w with gradient g::

        ratio = trust |w| / (|g| + weight_decay |w|)
        m     = momentum m + ratio (g + weight_decay w)
        w     = w - lr m

    The ratio is 1 in groups with ``adapt=False``, and where w or g is 0. The rate multiplies the
    momentum, as in torch.optim.SGD and timm; in the paper it is inside the momentum, which differs
    where the rate changes. timm does not adapt a group without weight decay; here only ``adapt``
    decides.

    Args:
        params: parameters, or groups of them such as ``norm_groups(model, adapt=False)``.
        lr: learning rate; a number or a tensor without dimensions.
        momentum: factor of the momentum.
        weight_decay: factor of the weights that is added to the gradient.
        trust: the paper's trust coefficient, the largest |step| / |w| at a rate of 1 without
            momentum.
        adapt: scale the step to the norm of the weights; an option of each group.

    >>> weight = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
    >>> weight.grad = torch.tensor([0.0, 0.1])
    >>> LARS([weight], lr=1.0, trust=0.01).step()
    >>> weight.data  # |w| is 5, so the step is 0.05
    tensor([3.0000, 3.9500])

    """

    def __init__(
        self,
        params: Parameters,
        lr: float | Tensor,
        *,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust: float = 0.001,
        adapt: bool = True,
    ) -> None:
        check_rate("momentum", momentum)
        check_trust("trust", trust)
        options = {"momentum": momentum, "trust": trust, "adapt": adapt}
        super().__init__(params, lr, weight_decay=weight_decay, **options)

    def _changes(self, group: Group, weights: Tensors, gradients: Tensors) -> list[Change]:
        decay, trust = group["weight_decay"], group["trust"]
        before = self._kept("momentum_buffer", weights)
        steps = torch._foreach_add(gradients, weights, alpha=decay)
        if group["adapt"]:
            of_weights, of_gradients = _norms(weights), _norms(gradients)
            ratios = trust * of_weights / (of_gradients + decay * of_weights)
            _scale(steps, ratios, of_weights, of_gradients)
        momenta = torch._foreach_mul(before, group["momentum"])
        torch._foreach_add_(momenta, steps)
        new = torch._foreach_sub(weights, torch._foreach_mul(momenta, group["lr"]))
        return [(before, momenta), (weights, new)]


class LAMB(Layerwise):
    """Adam with layer-wise rates (You et al. 2020).

    For each tensor of weights w with gradient g, at its step t::

        m    = beta1 m + (1 - beta1) g
        v    = beta2 v + (1 - beta2) g^2
        u    = (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps) + weight_decay w
        w    = w - lr (|w| / |u|) u

    |w| / |u| is 1 in groups with ``adapt=False``, and where w or u is 0. It is timm's Lamb with
    ``max_grad_norm=None``: weight decay is part of the step whose norm is taken, and neither ratio
    nor gradients are clipped. timm does not adapt a group without weight decay; here only ``adapt``
    decides.

    Args:
        params: parameters, or groups of them such as ``norm_groups(model, adapt=False)``.
        lr: learning rate; a number or a tensor without dimensions.
        betas: decay of the averages of the gradient and of its square.
        eps: added to the square root.
        weight_decay: factor of the weights that is added to the step.
        adapt: scale the step to the norm of the weights; an option of each group.

    >>> weight = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
    >>> weight.grad = torch.tensor([0.0, 0.1])
    >>> LAMB([weight], lr=0.01).step()
    >>> weight.data  # |w| is 5, so the step is 0.05
    tensor([3.0000, 3.9500])

    """

    def __init__(
        self,
        params: Parameters,
        lr: float | Tensor,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        adapt: bool = True,
    ) -> None:
        check_betas(betas, eps)
        options = {"betas": betas, "eps": eps, "adapt": adapt}
        super().__init__(params, lr, weight_decay=weight_decay, **options)

    def _changes(self, group: Group, weights: Tensors, gradients: Tensors) -> list[Change]:
        beta1, beta2 = group["betas"]
        old_means, old_squares = (self._kept(n, weights) for n in ("exp_avg", "exp_avg_sq"))
        counts = self._kept("step", weights, lambda w: w.new_zeros((), dtype=torch.float32))
        steps_done = torch._foreach_add(counts, 1)
        means = torch._foreach_lerp(old_means, gradients, 1 - beta1)
        squares = torch._foreach_mul(old_squares, beta2)
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - beta2)
        done = torch.stack(steps_done).to(wide_dtype(weights[0]))
        roots = torch._foreach_sqrt(squares)
        torch._foreach_div_(roots, _bias_correction(beta2, done).sqrt().unbind())
        torch._foreach_add_(roots, group["eps"])
        steps = torch._foreach_div(means, _bias_correction(beta1, done).unbind())
        torch._foreach_div_(steps, roots)
        torch._foreach_add_(steps, weights, alpha=group["weight_decay"])
        if group["adapt"]:
            of_weights, of_steps = _norms(weights), _norms(steps)
            _scale(steps, of_weights / of_steps, of_weights, of_steps)
        new = torch._foreach_sub(weights, torch._foreach_mul(steps, group["lr"]))
        kept = (counts, old_means, old_squares, weights)
        return list(zip(kept, (steps_done, means, squares, new), strict=True))


def check_trust(field: str, trust: float) -> None:
    """Refuse a trust coefficient that is not above 0."""
    if not 0 < trust < inf:
        raise InputError(field, f"{trust} is not above 0", "use 0.001, for example")


def _norms(tensors: Tensors) -> Tensor:
    """Return the L2 norm of each tensor, as one vector."""
    return torch.stack(torch._foreach_norm(tensors, 2, dtype=wide_dtype(tensors[0])))


def _scale(steps: Tensors, ratios: Tensor, norms: Tensor, others: Tensor) -> None:
    """Multiply each step by its ratio, or by 1 where one of its two norms is 0."""
    known = (norms > 0) & (others > 0)
    torch._foreach_mul_(steps, torch.where(known, ratios, 1.0).unbind())


def _bias_correction(beta: float, steps: Tensor) -> Tensor:
    """Return 1 - beta^steps, which is exact to rounding also for a beta near 1."""
    return -torch.expm1(steps * (log(beta) if beta else -inf))


def _write(kept: Tensors, new: Tensors, skip: Tensor | None) -> None:
    """Give tensors their new values, unless ``skip`` is 1."""
    if skip is not None:
        new = [torch.where(skip == 1, *pair) for pair in zip(kept, new, strict=True)]
    torch._foreach_copy_(kept, new)
