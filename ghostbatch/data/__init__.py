"""Data sets, augmentation, and the exact stream of batches."""

from ghostbatch.data.catalog import DATASETS, Data, Feed, find_dataset, find_info, load, open_feed
from ghostbatch.data.datasets import Info
from ghostbatch.data.feed import MicroBatch, TensorFeed, to_device
from ghostbatch.data.fingerprint import Fingerprint, fingerprint_of
from ghostbatch.data.folder import OnBadImage
from ghostbatch.data.stream import PermutationStream

__all__ = [
    "DATASETS",
    "Data",
    "Feed",
    "Fingerprint",
    "Info",
    "MicroBatch",
    "OnBadImage",
    "PermutationStream",
    "TensorFeed",
    "find_dataset",
    "find_info",
    "fingerprint_of",
    "load",
    "open_feed",
    "to_device",
]
