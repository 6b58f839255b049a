"""One run, from recipe to summary."""

from ghostbatch.train.estimate import data_bytes, estimate
from ghostbatch.train.folder import read_header
from ghostbatch.train.loop import find_device, train
from ghostbatch.train.record import OnRecord, Record, Summary, read_records, read_summary

__all__ = [
    "OnRecord",
    "Record",
    "Summary",
    "data_bytes",
    "estimate",
    "find_device",
    "read_header",
    "read_records",
    "read_summary",
    "train",
]
