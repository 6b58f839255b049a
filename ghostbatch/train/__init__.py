"""One run, from recipe to summary."""

from ghostbatch.train.loop import find_device, train
from ghostbatch.train.record import OnRecord, Record, Summary, read_records, read_summary

__all__ = [
    "OnRecord",
    "Record",
    "Summary",
    "find_device",
    "read_records",
    "read_summary",
    "train",
]
