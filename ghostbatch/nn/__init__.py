"""Ghost batch norm layers, conversion of models, and the paper's networks."""

from ghostbatch.nn.convert import to_ghost, to_plain
from ghostbatch.nn.networks import MODELS, find_model
from ghostbatch.nn.norm import (
    GhostBatchNorm1d,
    GhostBatchNorm2d,
    GhostBatchNorm3d,
    sync_statistics,
)

__all__ = [
    "MODELS",
    "GhostBatchNorm1d",
    "GhostBatchNorm2d",
    "GhostBatchNorm3d",
    "find_model",
    "sync_statistics",
    "to_ghost",
    "to_plain",
]
