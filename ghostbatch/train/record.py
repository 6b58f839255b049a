"""The records that a run writes, and the summary that it ends with."""

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from math import isfinite, nan
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from ghostbatch.errors import InputError
from ghostbatch.files import (
    DamagedError,
    add_crc,
    atomic_file,
    check_regular,
    errors_name,
    parse_line,
    read_checked_json,
    read_regular,
    to_checked_json,
)
from ghostbatch.recipe import Plan

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
    """"train": means since the last one; "validation": on the test set, or the held-out images."""
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
    noise_scale: float | None = None
    """In a validation record, if it is measured: the gradient noise scale, in samples.

    It is infinite, and null in ``metrics.jsonl``, if the estimate of |G|^2 is not above 0.
    """
    noise_scale_low: float | None = None
    """Lower end of its 95 % interval."""
    noise_scale_high: float | None = None
    """Upper end of the interval; infinite, and null in the file, if it has none."""
    sharpness: float | None = None
    """In a validation record, if it is measured: the largest eigenvalue of the Hessian of the loss
    over a thousand training images."""


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
    skipped_images: int = 0
    """Training images that could not be read and were replaced by others."""
    skipped_test_images: int = 0
    """Test images that could not be read and were left out of the accuracy."""
    recalibrated_accuracy: float | None = None
    """The accuracy with running statistics averaged over the training set; None if unknown."""
    ema_accuracy: float | None = None
    """With ``Recipe.ema``: the accuracy of the averaged weights, with running statistics averaged
    over the training set. Without, ``summary.json`` has no such field."""
    held_out: bool = False
    """Whether the accuracies and the loss are on held-out training images, not on the test set."""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a run is, and how it computes. The first one of a run says where it begins."""

    plan: Plan
    device: str
    threads: int
    """CPU threads."""
    engine: str
    """How an update is computed: "eager" or "cuda graph"."""
    update: int
    """Updates done."""
    end: int
    """Updates in all; with hold "distance" an upper bound until the last drop."""


MEASURED = ("noise_scale", "noise_scale_low", "noise_scale_high", "sharpness")
"""Fields of a record that ``metrics.jsonl`` has only if they are measured."""

Result = TypeVar("Result", Record, Summary)
OnRecord = Callable[[Record], None]
"""Called with every record when it is written."""
OnProgress = Callable[[Progress], None]
"""Called before the first update of a run, and then at least every 20 updates."""


class Recorder:
    """Appends records to a file, after cutting it to ``keep`` bytes, and calls ``on_record``.

    Records after the checkpoint are cut, because their updates will be run again. Every line has a
    checksum of its own, so that damage is found at any time and traced to its line, and a file that
    was cut short is as good as whole up to there.
    """

    def __init__(self, path: Path, keep: int, on_record: OnRecord | None) -> None:
        check_regular(path)
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
        line = add_crc(to_json(record)).encode() + b"\n"
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
    return json.dumps(_plain(result))


def _plain(result: Record | Summary) -> dict[str, Any]:
    fields = asdict(result)
    for name in ("ema_accuracy", *MEASURED):
        if fields.get(name, 0) is None:
            del fields[name]
    bad = [name for name, v in fields.items() if isinstance(v, float) and not isfinite(v)]
    return {**fields, **dict.fromkeys(bad)}


def read_records(path: Path, *, skip_damaged: bool = False) -> list[Record]:
    """Return the records of a file, without a last line that was cut short.

    Damaged lines are refused by their numbers, or left out.
    """
    records, damaged = parse_records(read_regular(path) if path.exists() else b"")
    if damaged and not skip_damaged:
        remedy = "once the run has ended, delete these lines to do without them"
        raise InputError("folder", name_lines(path, damaged), remedy)
    return records


def parse_records(content: bytes) -> tuple[list[Record], list[int]]:
    """Return the records in complete lines, and the numbers of the lines that are damaged."""
    records, damaged = [], []
    for number, line in enumerate(content.split(b"\n")[:-1], start=1):
        try:
            records.append(_from_fields(Record, parse_line(line)))
        except DamagedError:
            damaged.append(number)
    return records, damaged


def name_lines(path: Path, numbers: Sequence[int]) -> str:
    """Return which lines of a file are damaged, in words.

    >>> name_lines(Path("metrics.jsonl"), [3, 4, 8, 9])
    'lines 3, 4, 8 and 1 more of metrics.jsonl are damaged'
    """
    if len(numbers) == 1:
        return f"line {numbers[0]} of {path} is damaged"
    more = f" and {len(numbers) - 3} more" if len(numbers) > 3 else ""
    return f"lines {', '.join(map(str, numbers[:3]))}{more} of {path} are damaged"


def write_summary(path: Path, summary: Summary) -> None:
    """Write a summary with its checksum."""
    with atomic_file(path) as file:
        file.write(to_checked_json(_plain(summary)))


def read_summary(path: Path) -> Summary | None:
    """Return the summary, or None if the run has not ended; refuse a damaged one."""
    try:
        return parse_summary(path)
    except DamagedError as damage:
        remedy = "run its command again, which writes it anew"
        raise InputError("folder", f"{path} {damage}", remedy) from None


def intact_summary(path: Path) -> Summary | None:
    """Return the summary, or None if there is none or it is damaged: then the run ends again."""
    try:
        return parse_summary(path)
    except DamagedError:
        return None


def parse_summary(path: Path) -> Summary | None:
    """Return the summary, or None if there is none; raise `DamagedError` if it is damaged."""
    return _from_fields(Summary, read_checked_json(path)) if path.exists() else None


def _from_fields(kind: type[Result], fields: dict[str, Any]) -> Result:
    """Undo `_plain`; raise `DamagedError` if a field is unknown, missing or of another type."""
    readers = _READERS[kind]
    try:
        return kind(**{name: readers[name](value) for name, value in fields.items()})
    except (KeyError, TypeError, ValueError, OverflowError):
        raise DamagedError("cannot be read") from None


def _reader(hint: Any) -> Callable[[Any], Any]:
    """Return a function that checks and converts the JSON value of a field of that type."""

    def read_optional(value: Any) -> Any:
        return None if value is None else inner(value)

    def read_float(value: Any) -> float:
        if value is None:
            return nan
        return float(_require(type(value) in (int, float), value))

    def read_choice(value: Any) -> Any:
        return _require(value in choices, value)

    def read_exact(value: Any) -> Any:
        return _require(type(value) is (get_origin(hint) or hint), value)

    choices = get_args(hint)
    if isinstance(hint, UnionType):  # with None
        inner = _reader(choices[0])
        return read_optional
    if get_origin(hint) is Literal:
        return read_choice
    return read_float if hint is float else read_exact


def _require(holds: bool, value: Any) -> Any:
    if not holds:
        raise ValueError(value)
    return value


_READERS: dict[type, dict[str, Callable[[Any], Any]]] = {
    kind: {name: _reader(hint) for name, hint in get_type_hints(kind).items()}
    for kind in (Record, Summary)
}
