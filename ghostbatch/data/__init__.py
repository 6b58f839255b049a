"""Data sets, augmentation, and the exact stream of batches."""

from ghostbatch.data.catalog import (
    DATASETS,
    Data,
    Feed,
    Normalisation,
    check_image_size,
    find_dataset,
    find_info,
    is_folder,
    load,
    open_feed,
)
from ghostbatch.data.datasets import Info, check_holdout
from ghostbatch.data.feed import MicroBatch, TensorFeed, to_device
from ghostbatch.data.fingerprint import Fingerprint, fingerprint_of
from ghostbatch.data.folder import FolderFeed
from ghostbatch.data.sampler import ExactBatchSampler
from ghostbatch.data.skipped import OnBadImage, SkippedImages, check_limit
from ghostbatch.data.split import BatchSplit
from ghostbatch.data.stream import PermutationStream

__all__ = [
    "DATASETS",
    "BatchSplit",
    "Data",
    "ExactBatchSampler",
    "Feed",
    "Fingerprint",
    "FolderFeed",
    "Info",
    "MicroBatch",
    "Normalisation",
    "OnBadImage",
    "PermutationStream",
    "SkippedImages",
    "TensorFeed",
    "check_holdout",
    "check_image_size",
    "check_limit",
    "find_dataset",
    "find_info",
    "fingerprint_of",
    "is_folder",
    "load",
    "open_feed",
    "to_device",
]
