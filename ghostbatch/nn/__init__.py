"""Ghost batch norm layers, conversion of models, and the paper's networks."""

from ghostbatch.nn.convert import to_ghost, to_plain
from ghostbatch.nn.dropout import Place, place_dropout
from ghostbatch.nn.networks import MODELS, find_model
from ghostbatch.nn.norm import (
    GhostBatchNorm1d,
    GhostBatchNorm2d,
    GhostBatchNorm3d,
    sync_statistics,
)
from ghostbatch.nn.whole import to_whole

__all__ = [
    "MODELS",
    "GhostBatchNorm1d",
    "GhostBatchNorm2d",
    "GhostBatchNorm3d",
    "Place",
    "find_model",
    "place_dropout",
    "sync_statistics",
    "to_ghost",
    "to_plain",
    "to_whole",
]
