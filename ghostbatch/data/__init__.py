"""Data sets, augmentation, and the exact stream of batches."""

from ghostbatch.data.catalog import DATASETS, Data, find_dataset, find_info, load, open_feed
from ghostbatch.data.datasets import ImageData, Info, Split
from ghostbatch.data.draws import generator, key
from ghostbatch.data.feed import Feed, Piece, TensorFeed
from ghostbatch.data.folder import OnBadImage
from ghostbatch.data.stream import PermutationStream

__all__ = [
    "DATASETS",
    "Data",
    "Feed",
    "ImageData",
    "Info",
    "OnBadImage",
    "PermutationStream",
    "Piece",
    "Split",
    "TensorFeed",
    "find_dataset",
    "find_info",
    "generator",
    "key",
    "load",
    "open_feed",
]
