"""Instruments for anyone's training: how far the weights walk, and by which law."""

from ghostbatch.diagnostics.diffusion import DiffusionFit, fit_diffusion
from ghostbatch.diagnostics.distance import Distance, WeightDistance, log_spaced

__all__ = ["DiffusionFit", "Distance", "WeightDistance", "fit_diffusion", "log_spaced"]
