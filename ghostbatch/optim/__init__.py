"""Regimes, their scheduler, and the rules that follow the batch size."""

from ghostbatch.optim.regime import Drop, Epochs, Rates, Regime, exact, update_at
from ghostbatch.optim.scaling import Rule, lr_scale, noise_weights
from ghostbatch.optim.scheduler import RegimeScheduler

__all__ = [
    "Drop",
    "Epochs",
    "Rates",
    "Regime",
    "RegimeScheduler",
    "Rule",
    "exact",
    "lr_scale",
    "noise_weights",
    "update_at",
]
