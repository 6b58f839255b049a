"""Data sets, augmentation, and the exact stream of batches."""

from ghostbatch.data.catalog import (
    DATASETS,
    Data,
    Feed,
    check_image_size,
    find_dataset,
    find_info,
    is_folder,
    load,
    open_feed,
)
from ghostbatch.data.datasets import Info
from ghostbatch.data.feed import MicroBatch, TensorFeed, to_device
from ghostbatch.data.folder import OnBadImage
from ghostbatch.data.stream import PermutationStream

__all__ = [
    "DATASETS",
    "Data",
    "Feed",
    "Info",
    "MicroBatch",
    "OnBadImage",
    "PermutationStream",
    "TensorFeed",
    "check_image_size",
    "find_dataset",
    "find_info",
    "is_folder",
    "load",
    "open_feed",
    "to_device",
]
