"""Measurements for any training loop: weight distance, noise scale, the loss around a point."""

from ghostbatch.diagnostics.covariance import IncrementCovariance, RuleCheck, cosine, effective_rank
from ghostbatch.diagnostics.diffusion import DiffusionFit, fit_diffusion
from ghostbatch.diagnostics.distance import Distance, WeightDistance, log_spaced
from ghostbatch.diagnostics.gradients import increment_covariance, per_sample_gradients
from ghostbatch.diagnostics.noise_scale import GradientNoiseScale, NoiseScale
from ghostbatch.diagnostics.plateau import Plateau, find_plateau
from ghostbatch.diagnostics.potential import RandomPotential, random_potential
from ghostbatch.diagnostics.roughness import Bins, Roughness, fit_roughness
from ghostbatch.diagnostics.scan import BatchedLoss
from ghostbatch.diagnostics.scheduler import DistanceScheduler, distances_at
from ghostbatch.diagnostics.sharpness import Eigenvalue, largest_eigenvalue

__all__ = [
    "BatchedLoss",
    "Bins",
    "DiffusionFit",
    "Distance",
    "DistanceScheduler",
    "Eigenvalue",
    "GradientNoiseScale",
    "IncrementCovariance",
    "NoiseScale",
    "Plateau",
    "RandomPotential",
    "Roughness",
    "RuleCheck",
    "WeightDistance",
    "cosine",
    "distances_at",
    "effective_rank",
    "find_plateau",
    "fit_diffusion",
    "fit_roughness",
    "increment_covariance",
    "largest_eigenvalue",
    "log_spaced",
    "per_sample_gradients",
    "random_potential",
]
