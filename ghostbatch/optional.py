"""Imports of optional libraries, with one clear error if they are missing."""

import sys
from importlib import import_module
from types import ModuleType

import torch

from ghostbatch.errors import InputError


def import_torchvision() -> ModuleType:
    """Import torchvision, also where its compiled operators do not load.

    A torchvision that was built for another torch (one with CUDA, say) fails to register its
    operators and then fails to import. No data set and no classifier uses these operators, so
    this function defines the two schemas that the import asks for and imports again.
    """
    try:
        return _import("torchvision")
    except RuntimeError as error:
        if "torchvision::nms does not exist" not in str(error):
            raise
    schemas = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        schemas.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    for name in [n for n in sys.modules if n.partition(".")[0] == "torchvision"]:
        del sys.modules[name]  # what the failed import left
    torchvision = import_module("torchvision")
    torchvision.schemas = schemas  # type: ignore[attr-defined]  # keep them alive
    return torchvision


def import_timm() -> ModuleType:
    """Import timm, which imports torchvision."""
    import_torchvision()  # timm's own import of it would fail where the operators do not load
    return _import("timm")


def import_ray() -> ModuleType:
    """Import Ray."""
    return _import("ray", "'ghostbatch[ray]'")


def import_lightning() -> ModuleType:
    """Import ``lightning.pytorch`` or ``pytorch_lightning``; first the one that is in use."""
    names = sorted(("lightning.pytorch", "pytorch_lightning"), key=lambda n: n not in sys.modules)
    import_torchvision()  # Lightning's own import of it would fail where the operators do not load
    for name in names:
        try:
            return import_module(name)
        except ModuleNotFoundError as error:
            if error.name not in (name, name.partition(".")[0]):
                raise
    raise _not_installed("lightning", "'ghostbatch[lightning]'")


def _import(library: str, package: str | None = None) -> ModuleType:
    """Import a library; if it is missing, say how to install it."""
    try:
        return import_module(library)
    except ModuleNotFoundError as error:
        if error.name != library:
            raise
        raise _not_installed(library, package) from None


def _not_installed(library: str, package: str | None = None) -> InputError:
    return InputError(library, "is not installed", f"run pip install {package or library}")
