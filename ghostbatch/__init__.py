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
    from ghostbatch import nn as nn
    from ghostbatch.diagnostics import GradientNoiseScale as GradientNoiseScale
    from ghostbatch.diagnostics import WeightDistance as WeightDistance
    from ghostbatch.diagnostics import fit_diffusion as fit_diffusion
    from ghostbatch.diagnostics import increment_covariance as increment_covariance
    from ghostbatch.diagnostics import random_potential as random_potential
    from ghostbatch.errors import InputError as InputError
    from ghostbatch.nn import GhostBatchNorm1d as GhostBatchNorm1d
    from ghostbatch.nn import GhostBatchNorm2d as GhostBatchNorm2d
    from ghostbatch.nn import GhostBatchNorm3d as GhostBatchNorm3d
    from ghostbatch.nn import fold_convolutions as fold_convolutions
    from ghostbatch.nn import recalibrate as recalibrate
    from ghostbatch.nn import register_conversion as register_conversion
    from ghostbatch.nn import sync_statistics as sync_statistics
    from ghostbatch.nn import to_ghost as to_ghost
    from ghostbatch.nn import to_plain as to_plain
    from ghostbatch.nn import unfold_convolutions as unfold_convolutions
    from ghostbatch.ops import LOCAL as LOCAL
    from ghostbatch.ops import ghost_batch_norm as ghost_batch_norm
    from ghostbatch.optim import Regime as Regime
    from ghostbatch.optim import RegimeScheduler as RegimeScheduler
    from ghostbatch.optim import adapt as adapt
    from ghostbatch.optim import lr_scale as lr_scale
    from ghostbatch.optim import noise_weights as noise_weights
    from ghostbatch.recipe import Recipe as Recipe
    from ghostbatch.train import load_run as load_run
    from ghostbatch.train import train as train

_NAMES = {
    "diagnostics": "GradientNoiseScale WeightDistance fit_diffusion increment_covariance "
    "random_potential",
    "errors": "InputError",
    "nn": "GhostBatchNorm1d GhostBatchNorm2d GhostBatchNorm3d fold_convolutions recalibrate "
    "register_conversion sync_statistics to_ghost to_plain unfold_convolutions",
    "ops": "LOCAL ghost_batch_norm",
    "optim": "Regime RegimeScheduler adapt lr_scale noise_weights",
    "recipe": "Recipe",
    "train": "load_run train",
}
"""The public names of each module."""
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = ["nn"]
__all__ += list(_MODULE_OF)


def __getattr__(name: str) -> Any:
    """Import a public name, or a module such as ``nn``, on first use, and keep it."""
    if name in _MODULE_OF:
        value = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    elif name in ("data", *_NAMES):
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
