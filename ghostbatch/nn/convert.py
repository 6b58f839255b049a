"""Converts a model's BatchNorm layers to ghost layers, and back.

A ghost layer has the parameters and buffers of the BatchNorm it replaces, so conversion only
changes the class of the object: optimizers, hooks, names and shared layers stay valid.
"""

import warnings
from collections.abc import Iterable
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ghostbatch.errors import InputError, check_is
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


def register_conversion(
    plain_class: type[_BatchNorm], ghost_class: type[norm.GhostBatchNorm]
) -> None:
    """Let `to_ghost` convert layers of ``plain_class`` to ``ghost_class``, and `to_plain` back.

    Conversion changes the class of a layer and calls no constructor. So the ghost class can use the
    attributes of a plain layer, and ``ghost``, ``running`` and ``process_group``, which conversion
    sets, but no others. If ``plain_class.forward`` calls ``super().forward``, an empty class that
    inherits from it and then from `GhostBatchNorm2d` (or 1d, 3d) is enough.

    Layers of subclasses of ``plain_class`` are not converted: each class is registered by itself.
    """
    if not issubclass(plain_class, _BatchNorm) or issubclass(plain_class, norm.GhostBatchNorm):
        problem = f"{plain_class.__name__} is not a plain batch norm"
        raise InputError("plain_class", problem, "give a subclass of torch.nn.BatchNorm*")
    if not issubclass(ghost_class, norm.GhostBatchNorm):
        problem = f"{ghost_class.__name__} is not a ghost batch norm"
        raise InputError("ghost_class", problem, "give a subclass of GhostBatchNorm*")
    if PLAIN_OF.get(ghost_class, plain_class) is not plain_class:
        problem = f"{ghost_class.__name__} is already that of {PLAIN_OF[ghost_class].__name__}"
        raise InputError("ghost_class", problem, "give each plain class a ghost class of its own")
    GHOST_OF[plain_class], PLAIN_OF[ghost_class] = ghost_class, plain_class


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
    "sequential" otherwise. Layers that cannot be converted are left alone, with a warning that
    names them: subclasses of BatchNorm that were not registered with `register_conversion`, because
    they may add behaviour that would be lost, and scripted layers and layers whose ``forward`` was
    replaced, because a change of their class would have no effect.
    """
    check_is("model", model, nn.Module, "a torch.nn.Module")
    check_options(ghost, running or "sequential")
    for name, layer in model.named_modules():
        if isinstance(layer, nn.SyncBatchNorm):
            what = f"{name or 'model'} is a {type(layer).__name__}"
            problem = f"{what}, which normalises over all ranks"
            raise InputError("model", problem, "build the model with BatchNorm instead")
    left_alone = unconvertible(model)
    _warn_of("to_ghost", left_alone)
    norms = convertible(model)
    convert_layers(norms, ghost, process_group, running)
    if not (norms or left_alone):
        warnings.warn("to_ghost found no batch norm in this model", stacklevel=2)
    return model


def convert_layers(
    layers: Iterable[Any],
    ghost: int,
    process_group: "ProcessGroup | str | None" = None,
    running: Running | None = None,
) -> None:
    """Make each layer, one of `convertible`, a ghost layer with these settings."""
    for layer in layers:
        layer.__class__ = GHOST_OF.get(type(layer), type(layer))
        layer.ghost = ghost
        layer.running = running or getattr(layer, "running", "sequential")
        layer.process_group = name_of(process_group) or getattr(layer, "process_group", None)
        if getattr(layer, "number", UNNUMBERED) == UNNUMBERED:
            layer.number = norm.number_for(layer.process_group)


def to_plain(model: Model) -> Model:
    """Convert every ghost layer of ``model`` back to the BatchNorm it was; return the model.

    Layers that cannot be converted are left alone with a warning, as in `to_ghost`.
    """
    check_is("model", model, nn.Module, "a torch.nn.Module")
    left_alone = {}
    for name, layer in model.named_modules():
        known = type(layer) in PLAIN_OF
        if known and not _forward_is_replaced(layer):
            layer.__class__ = PLAIN_OF[type(layer)]
            del layer.ghost, layer.running, layer.process_group
            layer.__dict__.pop("number", None)
        elif known or isinstance(layer, norm.GhostBatchNorm):
            described = f"{name or 'model'} ({type(layer).__name__})"
            left_alone[described] = REPLACED if known else _why_unknown(layer)
    _warn_of("to_plain", left_alone)
    return model


SUBCLASS = "these subclasses of BatchNorm alone; register_conversion says how to convert them"
REPLACED = (
    "these layers alone, because their forward was replaced, as Accelerate's hooks do; convert the "
    "model before that"
)
MADE_BY_PYTORCH = (
    "these layers alone, whose class was made by fully_shard or parametrize; convert the model "
    "before that"
)
SCRIPTED = "these scripted layers alone; convert the model before it is scripted or traced"


def convertible(model: nn.Module) -> list[nn.Module]:
    """Return the layers that `to_ghost` converts, or whose ghost size it changes."""
    return [layer for layer in model.modules() if _is_convertible(layer)]


def unconvertible(model: nn.Module) -> dict[str, str]:
    """Return the norm layers that `to_ghost` leaves alone, "name (class)", each with a reason."""
    found = {}
    for name, layer in model.named_modules():
        if _is_convertible(layer):
            continue
        scripted = isinstance(layer, torch.jit.ScriptModule)
        kind = str(layer.original_name) if scripted else type(layer).__name__
        if scripted and "BatchNorm" in kind:
            found[f"{name or 'model'} ({kind})"] = SCRIPTED
        elif isinstance(layer, _BatchNorm):
            known = type(layer) in GHOST_OF
            found[f"{name or 'model'} ({kind})"] = REPLACED if known else _why_unknown(layer)
    return found


def _why_unknown(layer: nn.Module) -> str:
    made = type(layer).__name__.startswith(("FSDP", "Parametrized"))
    return MADE_BY_PYTORCH if made else SUBCLASS


def _warn_of(function: str, left_alone: dict[str, str]) -> None:
    """Warn the caller of a function of the layers that it has left alone, once for each reason."""
    for reason in dict.fromkeys(left_alone.values()):
        names = ", ".join(name for name, why in left_alone.items() if why == reason)
        warnings.warn(f"{function} left {reason}: {names}", stacklevel=3)


def _is_convertible(layer: nn.Module) -> bool:
    """Return whether the layer is a ghost layer, or becomes one when its class is changed."""
    if isinstance(layer, _BatchNorm) and type(layer).__module__ == "timm.layers.norm_act":
        import_module("ghostbatch.nn.timm_norm")  # registers timm's class; timm is imported already
    if type(layer) in PLAIN_OF:
        return True
    return type(layer) in GHOST_OF and not _forward_is_replaced(layer)


def _forward_is_replaced(layer: nn.Module) -> bool:
    """Return whether the layer has a forward of its own, which stays when its class changes."""
    return "forward" in vars(layer)
