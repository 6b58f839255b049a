"""Ghost batch norm layers, conversion of models, and the paper's networks."""

from ghostbatch.nn.convert import (
    convertible,
    register_conversion,
    to_ghost,
    to_plain,
    unconvertible,
)
from ghostbatch.nn.cross_rank import to_cross_rank
from ghostbatch.nn.dropout import BatchPosition, key_dropout
from ghostbatch.nn.networks import MODELS, find_model
from ghostbatch.nn.norm import (
    GhostBatchNorm1d,
    GhostBatchNorm2d,
    GhostBatchNorm3d,
    sync_statistics,
)
from ghostbatch.nn.recalibrate import recalibrate

__all__ = [
    "MODELS",
    "BatchPosition",
    "GhostBatchNorm1d",
    "GhostBatchNorm2d",
    "GhostBatchNorm3d",
    "convertible",
    "find_model",
    "key_dropout",
    "recalibrate",
    "register_conversion",
    "sync_statistics",
    "to_cross_rank",
    "to_ghost",
    "to_plain",
    "unconvertible",
]
