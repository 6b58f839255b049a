"""Large-batch training without the generalization gap.

Ghost batch normalisation, square-root learning-rate scaling and regime adaptation, after Hoffer,
Hubara and Soudry, "Train longer, generalize better" (NIPS 2017), for anyone's training loop.
"""

__version__ = "0.1.0"

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
