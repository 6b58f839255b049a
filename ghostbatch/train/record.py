"""The records that a run writes, and the summary that it ends with."""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from math import isfinite
from pathlib import Path
from typing import Any, Literal

from ghostbatch.errors import InputError
from ghostbatch.files import errors_name

Split = Literal["train", "validation"]
Status = Literal["finished", "diverged"]


@dataclass(frozen=True, kw_only=True)
class Record:
    """One line of ``metrics.jsonl``."""

    update: int
    """Updates done."""
    epoch: float
    """Passes over the training set done."""
    split: Split
    """"train": means over the updates since the last one; "validation": the test set."""
    loss: float
    accuracy: float
    """In percent."""
    lr: float
    """Learning rate of the last update."""
    distance: float
    """Distance of the weights from their initial values."""
    gradient_norm: float | None = None
    """Mean norm before clipping, over the updates since the last train record."""
    clipped: float | None = None
    """Fraction of these updates that were clipped."""


@dataclass(frozen=True, kw_only=True)
class Summary:
    """How a run ended: ``summary.json``."""

    status: Status
    accuracy: float
    """Test accuracy after the last update, in percent; never the best one."""
    loss: float
    updates: int
    epochs: float
    distance: float
    seconds: float
    reason: str | None = None
    """Of a diverged run: the update, the layer where it began, and the remedy."""


OnRecord = Callable[[Record], None]


class Recorder:
    """Appends records to a file, after cutting it to ``keep`` bytes, and calls ``on_record``.

    Records after the checkpoint are cut, because their updates will be run again.
    """

    def __init__(self, path: Path, keep: int, on_record: OnRecord | None) -> None:
        self._path = path
        self._file = path.open("ab", buffering=0)  # closing then has nothing to write
        self._file.truncate(keep)
        self._file.seek(keep)  # truncating does not move the position
        self._on_record = on_record

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def write(self, record: Record) -> None:
        """Append one record and call ``on_record``."""
        line = to_json(record).encode() + b"\n"
        with errors_name(self._path):
            while line:
                line = line[self._file.write(line) :]
        if self._on_record is not None:
            self._on_record(record)

    def sync(self) -> int:
        """Flush the file to disk, before a checkpoint refers to it; return its length."""
        with errors_name(self._path):
            os.fsync(self._file.fileno())
        return self._file.tell()


def to_json(result: Record | Summary) -> str:
    """Return one JSON object; JSON has no NaN, so a number that is not finite becomes null."""
    fields = asdict(result)
    bad = [name for name, v in fields.items() if isinstance(v, float) and not isfinite(v)]
    return json.dumps({**fields, **dict.fromkeys(bad)})


def read_records(path: Path) -> list[Record]:
    """Return the records of a file, without a last line that was cut short."""
    records, damaged = parse_records(path.read_bytes() if path.exists() else b"")
    if damaged:
        problem = f"line {damaged[0]} of {path} is damaged"
        raise InputError("folder", problem, "delete the run's folder")
    return records


def parse_records(content: bytes) -> tuple[list[Record], list[int]]:
    """Return the records in complete lines, and the numbers of the lines that are damaged."""
    records, damaged = [], []
    for number, line in enumerate(content.split(b"\n")[:-1], start=1):
        try:
            records.append(Record(**_numbers(json.loads(line))))
        except (ValueError, TypeError, AttributeError):
            damaged.append(number)
    return records, damaged


def read_summary(path: Path) -> Summary | None:
    """Return the summary, or None if the run has not ended."""
    if not path.exists():
        return None
    with _readable(path):
        return Summary(**_numbers(json.loads(path.read_text())))


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except (ValueError, TypeError, AttributeError):
        raise InputError("folder", f"{path} cannot be read", "delete the run's folder") from None


def _numbers(fields: dict[str, Any]) -> dict[str, Any]:
    """Undo `to_json`: null becomes NaN, except in optional fields."""
    optional = {"gradient_norm", "clipped", "reason"}
    return {k: float("nan") if v is None and k not in optional else v for k, v in fields.items()}
