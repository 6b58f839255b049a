"""Converts a model's BatchNorm layers to ghost layers, and back.

A ghost layer has the parameters and buffers of the BatchNorm it replaces, so conversion only
changes the class of the object: optimizers, hooks, names and shared layers stay valid.
"""

import warnings
from typing import TYPE_CHECKING, TypeVar

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ghostbatch.nn import norm
from ghostbatch.ops import Running
from ghostbatch.ops.functional import check_options
from ghostbatch.ops.running.groups import name_of
from ghostbatch.ops.running.stats import UNNUMBERED

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Model = TypeVar("Model", bound=nn.Module)

GHOST_OF: dict[type[nn.Module], type[nn.Module]] = {
    nn.BatchNorm1d: norm.GhostBatchNorm1d,
    nn.BatchNorm2d: norm.GhostBatchNorm2d,
    nn.BatchNorm3d: norm.GhostBatchNorm3d,
    nn.LazyBatchNorm1d: norm.LazyGhostBatchNorm1d,
    nn.LazyBatchNorm2d: norm.LazyGhostBatchNorm2d,
    nn.LazyBatchNorm3d: norm.LazyGhostBatchNorm3d,
}
PLAIN_OF = {ghost: plain for plain, ghost in GHOST_OF.items()}


def to_ghost(
    model: Model,
    ghost: int = 128,
    process_group: "ProcessGroup | str | None" = None,
    *,
    running: Running | None = None,
) -> Model:
    """Convert every BatchNorm of ``model`` to a ghost layer, in place; return the model.

    On a layer that is a ghost layer already, this changes the ghost size, and the process group and
    the policy of running statistics if they are given; a new layer gets the default group and
    "sequential" otherwise. Subclasses of BatchNorm may add behaviour that would be lost, so they
    are left alone, with one warning that names them.
    """
    check_options(ghost, running or "sequential")
    left_alone = []
    layers = dict(model.named_modules())
    for name, layer in layers.items():
        if isinstance(layer, nn.SyncBatchNorm):
            raise ValueError(
                f"{name or 'model'} is a SyncBatchNorm, which normalises over all ranks; "
                "build the model with BatchNorm instead"
            )
    for name, layer in layers.items():
        if type(layer) in GHOST_OF or type(layer) in PLAIN_OF:
            layer.__class__ = GHOST_OF.get(type(layer), type(layer))
            layer.ghost = ghost
            layer.running = running or getattr(layer, "running", "sequential")
            layer.process_group = name_of(process_group) or getattr(layer, "process_group", None)
            if getattr(layer, "number", UNNUMBERED) == UNNUMBERED:
                layer.number = norm.number_for(layer.process_group)
        elif isinstance(layer, _BatchNorm):
            left_alone.append(f"{name or 'model'} ({type(layer).__name__})")
    if left_alone:
        warnings.warn(
            "to_ghost left these subclasses of BatchNorm alone: " + ", ".join(left_alone),
            stacklevel=2,
        )
    return model


def to_plain(model: Model) -> Model:
    """Convert every ghost layer of ``model`` back to the BatchNorm it was; return the model."""
    for layer in model.modules():
        if type(layer) in PLAIN_OF:
            layer.__class__ = PLAIN_OF[type(layer)]
            del layer.ghost, layer.running, layer.process_group
            layer.__dict__.pop("number", None)
    return model
