"""One run, from recipe to summary."""

from ghostbatch.train.device import find_device
from ghostbatch.train.estimate import Pace, data_bytes, estimate, measure_pace
from ghostbatch.train.header import read_header
from ghostbatch.train.load import load_run
from ghostbatch.train.loop import train
from ghostbatch.train.record import (
    OnProgress,
    OnRecord,
    Progress,
    Record,
    Summary,
    intact_summary,
    read_records,
    read_summary,
)

__all__ = [
    "OnProgress",
    "OnRecord",
    "Pace",
    "Progress",
    "Record",
    "Summary",
    "data_bytes",
    "estimate",
    "find_device",
    "intact_summary",
    "load_run",
    "measure_pace",
    "read_header",
    "read_records",
    "read_summary",
    "train",
]
