"""Regimes, their scheduler, optimizers as data, and the rules that follow the batch size."""

from ghostbatch.optim.adaptation import Time, adapt, scale_rates
from ghostbatch.optim.optimizers import SGD, OptimizerSpec, spec_from_dict, spec_to_dict
from ghostbatch.optim.regime import Drop, Epochs, Rates, Regime, update_at
from ghostbatch.optim.scaling import Rule, lr_scale, noise_weights, random_labels
from ghostbatch.optim.scheduler import RegimeScheduler

__all__ = [
    "SGD",
    "Drop",
    "Epochs",
    "OptimizerSpec",
    "Rates",
    "Regime",
    "RegimeScheduler",
    "Rule",
    "Time",
    "adapt",
    "lr_scale",
    "noise_weights",
    "random_labels",
    "scale_rates",
    "spec_from_dict",
    "spec_to_dict",
    "update_at",
]
