"""Reads the records of a run for its figures and fits; of a long run only some.

Figures have logarithmic or linear axes, so they need records at equal steps of log time and at
equal steps. Fits need those that every run has at the same updates, whatever its evaluations: the
updates of `log_spaced`. All are chosen while the file is read, and only those lines are parsed: a
million lines take seconds, and memory for a few thousand.
"""

import json
import re
import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, get_args

import numpy as np

from ghostbatch.diagnostics import log_spaced
from ghostbatch.errors import InputError
from ghostbatch.train import Record
from ghostbatch.train.record import Split, name_lines, parse_records

ALL = 600
"""Lines up to which every record is kept."""

PER_DECADE = 30
"""Records kept of each split for each tenfold number of updates, in longer files."""

EVENLY = 100
"""Records kept of each split at equal steps of the update, in longer files."""

BLOCK = 2**18
"""Bytes that are read at a time."""

LOG_SPACED = np.array(log_spaced(10**9))
"""The updates after which every run is recorded, besides its evaluations, drops and end."""

LINE = re.compile(rb'\{"update": (\d{1,18}), "epoch": [^,\n]+, "split": "(\w+)"[^\n]*\n')
"""A line of ``metrics.jsonl``."""

REMEDY = "once the run has ended, delete these lines to do without them"


class RunRecords(NamedTuple):
    """The records of a run that a report uses."""

    shown: list[Record]
    """For figures."""
    log_spaced: list[Record]
    """Training records at the updates of `LOG_SPACED`, for fits."""


class Lines(NamedTuple):
    """Complete lines of ``metrics.jsonl``, before most of them are parsed."""

    first: int
    """Number of the first line, counted from 1."""
    texts: list[bytes]
    updates: np.ndarray
    """-1 for a damaged line."""
    trained: np.ndarray
    """Whether the split of each line is "train"."""


class Chooser:
    """Chooses the lines of one split: the first of each step of update and of log update."""

    def __init__(self, updates: int) -> None:
        self._total = max(1, updates)
        self._before = np.array([-1, -1])

    def choose(self, updates: np.ndarray) -> np.ndarray:
        """Return whether to keep the line of each of the next updates."""
        log_steps = np.floor(PER_DECADE * np.log10(np.maximum(updates, 0.1))).astype(int)
        steps = np.stack([log_steps, updates * EVENLY // self._total], axis=1)
        changed = np.diff(steps, axis=0, prepend=self._before[None]) != 0
        self._before = steps[-1]
        return np.asarray(changed.any(1))


def read_run_records(path: Path, updates: int) -> RunRecords:
    """Return the records of a ``metrics.jsonl`` for a report; ``updates`` are those of the run.

    Of a file with more than `ALL` lines only the chosen lines are parsed and checked. Damaged lines
    are left out, with a warning; a file without any other line is refused.
    """
    choosers = {True: Chooser(updates), False: Chooser(updates)}
    chosen: dict[int, bytes] = {}
    last: dict[bool, tuple[int, bytes]] = {}
    damaged: list[int] = []
    for lines in _read_lines(path):
        damaged += (lines.first + np.flatnonzero(lines.updates < 0)).tolist()
        keep = np.isin(lines.updates, LOG_SPACED) & lines.trained
        if lines.first == 1 and len(lines.texts) <= ALL:
            keep[:] = True
        for trained, chooser in choosers.items():
            (indices,) = np.nonzero((lines.trained == trained) & (lines.updates >= 0))
            if len(indices):
                keep[indices] |= chooser.choose(lines.updates[indices])
                last[trained] = (lines.first + int(indices[-1]), lines.texts[indices[-1]])
        for index in np.flatnonzero(keep & (lines.updates >= 0)).tolist():
            chosen[lines.first + index] = lines.texts[index]
    chosen |= dict(last.values())
    records, bad = _parse({number: chosen[number] for number in sorted(chosen)})
    damaged = sorted([*damaged, *bad])
    if damaged and not records:
        raise InputError("folder", name_lines(path, damaged), REMEDY)
    if damaged:
        warnings.warn(f"{name_lines(path, damaged)}, and left out; {REMEDY}", stacklevel=2)
    spaced = set(LOG_SPACED.tolist())
    fitted = [r for r in records if r.split == "train" and r.update in spaced]
    return RunRecords(records, fitted)


def _read_lines(path: Path) -> Iterator[Lines]:
    """Yield the complete lines of a file; one that was cut short at the end is left out."""
    if not path.exists():
        return
    if not path.is_file():
        raise InputError("folder", f"{path} is not a regular file", "remove it")
    first, rest = 1, b""
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            complete, newline, rest = (rest + block).rpartition(b"\n")
            texts = complete.split(b"\n") if newline else []
            if texts:
                yield _recognise(first, texts, complete + newline)
            first += len(texts)


def _recognise(first: int, texts: list[bytes], content: bytes) -> Lines:
    """Find update and split of each line, at once if all are as this package writes them."""
    heads = LINE.findall(content)
    if len(heads) != len(texts):
        heads = [_head(text) for text in texts]
    updates = np.array([int(update) for update, _ in heads])
    return Lines(first, texts, updates, np.array([split == b"train" for _, split in heads]))


def _head(text: bytes) -> tuple[bytes | int, bytes]:
    """Return update and split of one line, maybe of another program; update -1 if it is damaged."""
    if found := LINE.fullmatch(text + b"\n"):
        return found[1], found[2]
    (records, _) = parse_records(text + b"\n")
    return (records[0].update, records[0].split.encode()) if records else (-1, b"")


def _parse(lines: dict[int, bytes]) -> tuple[list[Record], list[int]]:
    """Return the records of lines by their numbers, and the numbers of those that are damaged."""
    texts, numbers = list(lines.values()), list(lines)
    if (records := _parse_intact(texts)) is not None:
        return records, []
    records, damaged = parse_records(b"".join(text + b"\n" for text in texts))
    return records, [numbers[place - 1] for place in damaged]


def _parse_intact(texts: list[bytes]) -> list[Record] | None:
    """Return what `parse_records` does, in a third of the time; None if a line is unusual."""
    bodies = []
    for text in texts:
        body, found, crc = text.rpartition(b', "crc": "')
        if not found or crc != b'%08x"}' % zlib.crc32(body):
            return None
        bodies.append(body)
    try:
        every = json.loads(b"[" + b"},".join(bodies) + b"}]") if bodies else []
    except ValueError:
        return None
    for fields in every:
        if tuple(fields) != NAMES or tuple(map(type, fields.values())) not in TYPES:
            return None
    if len(every) != len(texts) or {fields["split"] for fields in every} - set(get_args(Split)):
        return None
    records = [object.__new__(Record) for _ in every]
    for record, fields in zip(records, every, strict=True):  # as Record(**fields), in a fifth
        object.__setattr__(record, "__dict__", fields)
    return records


NAMES = tuple(Record.__dataclass_fields__)
TYPES = {(int, float, str, *[float] * 4, *[last] * 2) for last in (float, type(None))}
"""Types of the values of a record; those of the last two may be None."""
