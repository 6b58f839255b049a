"""GhostBatchNorm1d, 2d and 3d: drop-in replacements for PyTorch's BatchNorm layers."""

import sys
import warnings
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ghostbatch.errors import InputError, check_is
from ghostbatch.ops import Running, ghost_batch_norm
from ghostbatch.ops.functional import check_options
from ghostbatch.ops.reference import Activation
from ghostbatch.ops.running.exchange import sync_layers
from ghostbatch.ops.running.groups import LOCAL, Group, name_of
from ghostbatch.ops.running.pending import forget_pending
from ghostbatch.ops.running.stats import UNNUMBERED, RunningStats, next_number

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@torch.fx.wrap  # one node for torch.fx, which has nn.BatchNorm as one node too
def _ghost_batch_norm(x: Tensor, dims: tuple[int, ...], *tensors: Any, **options: Any) -> Tensor:
    """Call `ghost_batch_norm` after a check of the number of dimensions."""
    if x.dim() not in dims:
        expected = " or ".join(f"{dim}D" for dim in dims)
        raise ValueError(f"expected {expected} input (got {x.dim()}D input)")
    return ghost_batch_norm(x, *tensors, **options)


class _NoQconfig:
    """Raises AttributeError, and warns before ``convert_sync_batchnorm`` replaces a ghost layer.

    That function, PyTorch's or timm's, replaces every batch norm by a SyncBatchNorm. It calls
    nothing of the old layer, but it reads ``qconfig``. Quantisation reads it too, so the warning
    depends on the name of the caller.
    """

    def __get__(self, layer: nn.Module | None, _: type) -> None:
        if layer is not None and sys._getframe(1).f_code.co_name == "convert_sync_batchnorm":
            warnings.warn(
                "convert_sync_batchnorm drops the ghosts of this model: SyncBatchNorm normalises "
                "over the batch of all ranks; leave it out, or call to_plain before it",
                stacklevel=2,
            )
        raise AttributeError("qconfig")


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
    number: int = UNNUMBERED  # of a layer that was pickled without one
    input_dims: tuple[int, ...]
    qconfig = _NoQconfig()

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
        self.number = number_for(self.process_group)

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
            # A compiler would compile the same block anew for every number.
            number=UNNUMBERED if torch.compiler.is_compiling() else self.number,
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

    def reset_running_stats(self) -> None:
        """As in nn.BatchNorm; also drop contributions that wait for those of other ranks."""
        forget_pending(self.running_mean)
        super().reset_running_stats()

    def _load_from_state_dict(self, *arguments: Any) -> None:
        forget_pending(self.running_mean)
        super()._load_from_state_dict(*arguments)

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


def number_for(group: Group) -> int:
    """Return a number for a layer that is built or converted; `UNNUMBERED` if it is `LOCAL`.

    So ranks may build different models of `LOCAL` layers, and number all other layers alike.
    """
    return UNNUMBERED if group == LOCAL else next_number()


def sync_statistics(model: nn.Module) -> None:
    """Bring the running statistics of ``model`` up to date on every rank; call it on all ranks.

    Backward does this already. Call it for layers that no gradient reaches, and after training-mode
    forwards without backward; ranks may have run different numbers of them. On one rank it does
    nothing.
    """
    check_is("model", model, nn.Module, "a torch.nn.Module")
    layers: dict[tuple[Group, torch.device], dict[int, RunningStats]] = {}
    for layer in model.modules():
        if not isinstance(layer, GhostBatchNorm):
            continue
        mean, var = layer.running_mean, layer.running_var
        if mean is not None and var is not None:
            rule = layer.num_batches_tracked, layer.momentum, layer.running, layer.number
            found = layers.setdefault((layer.process_group, mean.device), {})
            found[id(mean)] = RunningStats(mean, var, *rule)
    for (group, _), found in layers.items():
        sync_layers(list(found.values()), group)
