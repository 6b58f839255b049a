"""Instruments for anyone's training: how far the weights walk, by which law, and why."""

from ghostbatch.diagnostics.diffusion import DiffusionFit, fit_diffusion
from ghostbatch.diagnostics.distance import Distance, WeightDistance, log_spaced
from ghostbatch.diagnostics.potential import RandomPotential, random_potential
from ghostbatch.diagnostics.roughness import Bins, Roughness, fit_roughness
from ghostbatch.diagnostics.scan import BatchedLoss

__all__ = [
    "BatchedLoss",
    "Bins",
    "DiffusionFit",
    "Distance",
    "RandomPotential",
    "Roughness",
    "WeightDistance",
    "fit_diffusion",
    "fit_roughness",
    "log_spaced",
    "random_potential",
]
