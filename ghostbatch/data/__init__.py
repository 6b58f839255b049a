"""Data sets, augmentation, and the exact stream of batches."""

from ghostbatch.data.catalog import DATASETS, find_dataset, find_info, load
from ghostbatch.data.datasets import ImageData, Info, Split
from ghostbatch.data.draws import generator, key
from ghostbatch.data.feed import Feed, Piece
from ghostbatch.data.stream import PermutationStream

__all__ = [
    "DATASETS",
    "Feed",
    "ImageData",
    "Info",
    "PermutationStream",
    "Piece",
    "Split",
    "find_dataset",
    "find_info",
    "generator",
    "key",
    "load",
]
