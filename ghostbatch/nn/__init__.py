"""Ghost batch norm layers, conversion of models, and the paper's networks."""

from ghostbatch.nn.convert import (
    convert_layers,
    convertible,
    register_conversion,
    to_ghost,
    to_plain,
    unconvertible,
)
from ghostbatch.nn.cross_rank import to_cross_rank
from ghostbatch.nn.dropconnect import DropConnect
from ghostbatch.nn.dropout import BatchPosition, key_dropout
from ghostbatch.nn.fold import fold_convolutions, unfold_convolutions
from ghostbatch.nn.networks import MODELS, find_model, initialise_glorot
from ghostbatch.nn.norm import (
    GhostBatchNorm1d,
    GhostBatchNorm2d,
    GhostBatchNorm3d,
    sync_statistics,
)
from ghostbatch.nn.parts import join_gradients
from ghostbatch.nn.pool import MaxPool2d, MeanPool2d
from ghostbatch.nn.recalibrate import recalibrate

__all__ = [
    "MODELS",
    "BatchPosition",
    "DropConnect",
    "GhostBatchNorm1d",
    "GhostBatchNorm2d",
    "GhostBatchNorm3d",
    "MaxPool2d",
    "MeanPool2d",
    "convert_layers",
    "convertible",
    "find_model",
    "fold_convolutions",
    "initialise_glorot",
    "join_gradients",
    "key_dropout",
    "recalibrate",
    "register_conversion",
    "sync_statistics",
    "to_cross_rank",
    "to_ghost",
    "to_plain",
    "unconvertible",
    "unfold_convolutions",
]
