"""Large-batch training without the generalization gap.

Ghost batch normalisation, square-root learning-rate scaling and regime adaptation, after Hoffer,
Hubara and Soudry, "Train longer, generalize better" (NIPS 2017), for anyone's training loop.

Names are imported on first use, so that ``import ghostbatch`` does not import torch.
"""

__version__ = "0.1.0"

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ghostbatch import nn
    from ghostbatch.diagnostics import (
        WeightDistance,
        fit_diffusion,
        increment_covariance,
        random_potential,
    )
    from ghostbatch.nn import (
        GhostBatchNorm1d,
        GhostBatchNorm2d,
        GhostBatchNorm3d,
        sync_statistics,
        to_ghost,
        to_plain,
    )
    from ghostbatch.ops import LOCAL, ghost_batch_norm
    from ghostbatch.optim import Regime, RegimeScheduler, lr_scale, noise_weights
    from ghostbatch.recipe import Recipe
    from ghostbatch.train import train

__all__ = [
    "LOCAL",
    "GhostBatchNorm1d",
    "GhostBatchNorm2d",
    "GhostBatchNorm3d",
    "Recipe",
    "Regime",
    "RegimeScheduler",
    "WeightDistance",
    "fit_diffusion",
    "ghost_batch_norm",
    "increment_covariance",
    "lr_scale",
    "nn",
    "noise_weights",
    "random_potential",
    "sync_statistics",
    "to_ghost",
    "to_plain",
    "train",
]

_SUBMODULES = ("data", "diagnostics", "errors", "nn", "ops", "optim", "recipe")

_SOURCES = {
    "diagnostics": "WeightDistance fit_diffusion increment_covariance random_potential",
    "nn": "GhostBatchNorm1d GhostBatchNorm2d GhostBatchNorm3d sync_statistics to_ghost to_plain",
    "ops": "LOCAL ghost_batch_norm",
    "optim": "Regime RegimeScheduler lr_scale noise_weights",
    "recipe": "Recipe",
    "train": "train",
}
_MODULE_OF = {name: module for module, names in _SOURCES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    """Import a public name on first use, and keep it."""
    if name in _MODULE_OF:
        value = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    elif name in _SUBMODULES:
        value = import_module(f"{__name__}.{name}")
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    """Keeps ``ghostbatch.train`` the function.

    There is also a subpackage of that name. When it is imported, Python sets it as an attribute
    of this package, in place of the function.
    """

    def __setattr__(self, name: str, value: object) -> None:
        if not (name == "train" and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
