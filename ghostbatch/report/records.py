"""Reads the records of a run for its figures and fits; of a long run only some.

The figures have logarithmic axes, so they need records at equal steps of log time; fits need
records at equal steps. Both are chosen while the file is read, and only those lines are parsed: a
million lines take seconds, and memory for a few thousand.
"""

import re
from collections.abc import Iterator
from math import log10
from pathlib import Path
from typing import NamedTuple

from ghostbatch.errors import InputError
from ghostbatch.train import Record
from ghostbatch.train.record import parse_records

ALL = 2000
"""Lines up to which every record is kept."""

PER_DECADE = 100
"""Records kept of each split for each tenfold number of updates, in longer files."""

EVENLY = 500
"""Training records kept at equal steps, in longer files: at least this number, below twice that."""

START = re.compile(rb'\{"update": (\d{1,18}), "epoch": [^,]+, "split": "(\w+)"')
"""The start of a line of ``metrics.jsonl``."""


class Line(NamedTuple):
    """A line of ``metrics.jsonl`` before it is parsed."""

    number: int
    """Counted from 1."""
    update: int
    split: str
    text: bytes


class RunRecords(NamedTuple):
    """The records of a run that a report uses."""

    shown: list[Record]
    """For figures."""
    even: list[Record]
    """Training records at equal steps in the order of the file, for fits."""


class EvenSample:
    """Keeps every k-th line that it is given, and doubles k whenever these become too many."""

    def __init__(self) -> None:
        self.lines: list[Line] = []
        self._step, self._seen = 1, 0

    def add(self, line: Line) -> None:
        """Keep the line if it is a k-th."""
        if self._seen % self._step == 0:
            self.lines.append(line)
        self._seen += 1
        if len(self.lines) == 2 * EVENLY:
            self.lines, self._step = self.lines[::2], 2 * self._step


def read_run_records(path: Path) -> RunRecords:
    """Return the records of a ``metrics.jsonl`` for a report; refuse one with a damaged line.

    Of a file with more than `ALL` lines only the chosen lines are parsed and checked.
    """
    every: list[Line] = []
    spaced: dict[tuple[str, int], Line] = {}
    last: dict[str, Line] = {}
    even = EvenSample()
    count = 0
    for line in _lines(path):
        count = line.number
        if count <= ALL:
            every.append(line)
        step = int(PER_DECADE * log10(line.update)) if line.update else -1
        spaced.setdefault((line.split, step), line)
        last[line.split] = line
        if line.split == "train":
            even.add(line)
    if count <= ALL:
        records = _parse(every, path)
        return RunRecords(records, [record for record in records if record.split == "train"])
    kept = {line.number: line for line in (*spaced.values(), *last.values(), *even.lines)}
    numbers = sorted(kept)
    by_number = dict(zip(numbers, _parse([kept[n] for n in numbers], path), strict=True))
    return RunRecords(list(by_number.values()), [by_number[line.number] for line in even.lines])


def _lines(path: Path) -> Iterator[Line]:
    """Yield the complete lines of a file; one that was cut short at the end is left out."""
    if not path.exists():
        return
    if not path.is_file():
        raise InputError("folder", f"{path} is not a regular file", "remove it")
    with path.open("rb") as file:
        for number, text in enumerate(file, start=1):
            if not text.endswith(b"\n"):
                return
            if (found := START.match(text)) is not None:
                yield Line(number, int(found[1]), found[2].decode(), text)
            else:  # damaged, or written by another program
                (record,) = _parse([Line(number, 0, "", text)], path)
                yield Line(number, record.update, record.split, text)


def _parse(lines: list[Line], path: Path) -> list[Record]:
    records, damaged = parse_records(b"".join(line.text for line in lines))
    if damaged:
        where = f"line {lines[damaged[0] - 1].number} of {path} is damaged"
        raise InputError("folder", where, "delete that line, or the run's folder")
    return records
