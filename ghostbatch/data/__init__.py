"""Data sets, augmentation, and the exact stream of batches."""

from ghostbatch.data.datasets import DATASETS, ImageData, Split, load
from ghostbatch.data.draws import generator, key
from ghostbatch.data.feed import Feed, Piece
from ghostbatch.data.stream import PermutationStream

__all__ = [
    "DATASETS",
    "Feed",
    "ImageData",
    "PermutationStream",
    "Piece",
    "Split",
    "generator",
    "key",
    "load",
]
