"""Regimes, their scheduler, optimizers as data, and the rules that follow the batch size."""

from ghostbatch.optim.adaptation import Time, adapt, scale_rates
from ghostbatch.optim.average import WeightAverage
from ghostbatch.optim.groups import decay_groups, norm_groups
from ghostbatch.optim.growth import grow_batch, phase_updates
from ghostbatch.optim.layerwise import LAMB, LARS
from ghostbatch.optim.optimizers import (
    OPTIMIZERS,
    SGD,
    AdamW,
    LAMBSpec,
    LARSSpec,
    OptimizerKind,
    OptimizerSpec,
    spec_from_dict,
    spec_to_dict,
)
from ghostbatch.optim.regime import (
    Drop,
    Epochs,
    Rates,
    Regime,
    Schedule,
    regime_from_dict,
    regime_to_dict,
    update_at,
)
from ghostbatch.optim.scaling import (
    Rule,
    lr_scale,
    noise_weights,
    random_labels,
    rate_batch,
    scale_adam,
)
from ghostbatch.optim.scheduler import RegimeScheduler

__all__ = [
    "LAMB",
    "LARS",
    "OPTIMIZERS",
    "SGD",
    "AdamW",
    "Drop",
    "Epochs",
    "LAMBSpec",
    "LARSSpec",
    "OptimizerKind",
    "OptimizerSpec",
    "Rates",
    "Regime",
    "RegimeScheduler",
    "Rule",
    "Schedule",
    "Time",
    "WeightAverage",
    "adapt",
    "decay_groups",
    "grow_batch",
    "lr_scale",
    "noise_weights",
    "norm_groups",
    "phase_updates",
    "random_labels",
    "rate_batch",
    "regime_from_dict",
    "regime_to_dict",
    "scale_adam",
    "scale_rates",
    "spec_from_dict",
    "spec_to_dict",
    "update_at",
]
