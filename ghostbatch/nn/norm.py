"""GhostBatchNorm1d, 2d and 3d: drop-in replacements for PyTorch's BatchNorm layers."""

from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ghostbatch.errors import InputError
from ghostbatch.ops import Running, ghost_batch_norm
from ghostbatch.ops.functional import check_options
from ghostbatch.ops.reference import Activation
from ghostbatch.ops.running.exchange import exchange_pending
from ghostbatch.ops.running.groups import Group, name_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@torch.fx.wrap  # one node for torch.fx, which has nn.BatchNorm as one node too
def _ghost_batch_norm(x: Tensor, dims: tuple[int, ...], *tensors: Any, **options: Any) -> Tensor:
    """Call `ghost_batch_norm` after a check of the number of dimensions."""
    if x.dim() not in dims:
        expected = " or ".join(f"{dim}D" for dim in dims)
        raise ValueError(f"expected {expected} input (got {x.dim()}D input)")
    return ghost_batch_norm(x, *tensors, **options)


class GhostBatchNorm(_BatchNorm):
    """The base of the three layers; parameters and buffers are those of nn.BatchNorm.

    Args:
        num_features: channels, the second dimension of the input.
        ghost: samples that are normalised together in training.
        eps: added to the variance.
        momentum: weight of the newest ghost in the running statistics; None averages all.
        affine: learn a scale and a shift per channel.
        track_running_stats: keep statistics for evaluation.
        running: policy of the updates of running statistics: "sequential", one per ghost, or
            "mean", one per batch.
        process_group: ranks that share the running statistics; None is the default group, `LOCAL`
            keeps them to this rank.
        device: where the parameters live.
        dtype: of the parameters.
        bias: learn the shift; without it, `affine` is a scale alone.

    """

    ghost: int
    running: Running
    process_group: Group
    input_dims: tuple[int, ...]

    def __init__(
        self,
        num_features: int,
        ghost: int = 128,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        running: Running = "sequential",
        process_group: "ProcessGroup | str | None" = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        bias: bool = True,
    ) -> None:
        check_options(ghost, running)
        super().__init__(
            num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype
        )
        if not bias:  # older releases of PyTorch cannot be asked to leave it out
            self.register_parameter("bias", None)
        self.ghost = ghost
        self.running = running
        self.process_group = name_of(process_group)

    def forward(
        self,
        input: Tensor,  # noqa: A002 (nn.BatchNorm's name for it)
        residual: Tensor | None = None,
        activation: Activation | None = None,
        twice: bool = False,
    ) -> Tensor:
        """Normalise per ghost in training, by the running statistics in evaluation.

        Returns ``activation(norm(input) + residual)``, in one kernel where there is one. ``twice``
        returns it twice, see `ghost_batch_norm`.
        """
        # As in nn.BatchNorm: turning track_running_stats off stops the updates, not the use.
        uses_running = self.track_running_stats or not self.training
        return _ghost_batch_norm(
            input,
            self.input_dims,
            self.running_mean if uses_running else None,
            self.running_var if uses_running else None,
            self.weight,
            self.bias,
            ghost=self.ghost,
            training=self.training,
            momentum=self.momentum,
            eps=self.eps,
            running=self.running,
            num_batches_tracked=self.num_batches_tracked,
            activation=activation,
            residual=residual,
            group=self.process_group,
            twice=twice,
        )

    def reset_parameters(self) -> None:
        """As nn.BatchNorm, whose older releases need a bias."""
        self.reset_running_stats()
        if self.weight is not None:
            nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def __prepare_scriptable__(self) -> NoReturn:
        """Refuse torch.jit.script, which calls this first."""
        raise InputError(
            "torch.jit.script",
            f"{type(self).__name__} cannot be scripted",
            "call gb.to_plain(model) first, which evaluates the same, or use torch.export",
        )

    def extra_repr(self) -> str:
        """Show the ghost size next to what nn.BatchNorm shows."""
        plain = super().extra_repr()  # type: ignore[no-untyped-call]
        return f"{plain}, ghost={self.ghost}, running={self.running!r}"


class GhostBatchNorm1d(GhostBatchNorm, nn.BatchNorm1d):
    """Ghost batch norm over (N, C) or (N, C, L)."""

    input_dims = (2, 3)


class GhostBatchNorm2d(GhostBatchNorm, nn.BatchNorm2d):
    """Ghost batch norm over (N, C, H, W)."""

    input_dims = (4,)


class GhostBatchNorm3d(GhostBatchNorm, nn.BatchNorm3d):
    """Ghost batch norm over (N, C, D, H, W)."""

    input_dims = (5,)


class LazyGhostBatchNorm1d(nn.LazyBatchNorm1d):
    """What `to_ghost` makes of a lazy layer, which takes its width from its first input."""

    cls_to_become = GhostBatchNorm1d  # type: ignore[assignment]
    forward = GhostBatchNorm.forward


class LazyGhostBatchNorm2d(nn.LazyBatchNorm2d):
    """What `to_ghost` makes of a lazy layer, which takes its width from its first input."""

    cls_to_become = GhostBatchNorm2d  # type: ignore[assignment]
    forward = GhostBatchNorm.forward


class LazyGhostBatchNorm3d(nn.LazyBatchNorm3d):
    """What `to_ghost` makes of a lazy layer, which takes its width from its first input."""

    cls_to_become = GhostBatchNorm3d  # type: ignore[assignment]
    forward = GhostBatchNorm.forward


def sync_statistics(model: nn.Module) -> None:
    """Bring the running statistics of ``model`` up to date on every rank; call it on all ranks.

    Backward does this already. Call it for layers that no gradient reaches, and after training-mode
    forwards without backward. On one rank it does nothing.
    """
    mine = {
        id(layer.running_mean) for layer in model.modules() if isinstance(layer, GhostBatchNorm)
    }
    exchange_pending(lambda running: id(running.mean) in mine)
