"""Reads the records of a run for its figures and fits; of a long run only some.

The figures have logarithmic axes, so they need records at equal steps of log time. Fits need those
that every run has at the same updates, whatever its evaluations: the updates of `log_spaced`. Both
are chosen while the file is read, and only those lines are parsed: a million lines take seconds,
and memory for a few thousand.
"""

import re
import warnings
from collections.abc import Iterator
from math import log10
from pathlib import Path
from typing import NamedTuple

from ghostbatch.diagnostics import log_spaced
from ghostbatch.errors import InputError
from ghostbatch.train import Record
from ghostbatch.train.record import name_lines, parse_records

ALL = 2000
"""Lines up to which every record is kept."""

PER_DECADE = 100
"""Records kept of each split for each tenfold number of updates, in longer files."""

LOG_SPACED = frozenset(log_spaced(10**9))
"""The updates after which every run is recorded, besides its evaluations, drops and end."""

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
    log_spaced: list[Record]
    """Training records at the updates of `LOG_SPACED`, for fits."""


def read_run_records(path: Path) -> RunRecords:
    """Return the records of a ``metrics.jsonl`` for a report.

    Of a file with more than `ALL` lines only the chosen lines are parsed and checked. Damaged lines
    are left out, with a warning; a file without any other line is refused.
    """
    every: list[Line] = []
    spaced: dict[tuple[str, int], Line] = {}
    last: dict[str, Line] = {}
    fitted: list[Line] = []
    damaged: list[int] = []
    count = 0
    for line in _lines(path, damaged):
        count = line.number
        if count <= ALL:
            every.append(line)
        step = int(PER_DECADE * log10(line.update)) if line.update else -1
        spaced.setdefault((line.split, step), line)
        last[line.split] = line
        if line.split == "train" and line.update in LOG_SPACED:
            fitted.append(line)
    chosen = [*spaced.values(), *last.values(), *fitted] if count > ALL else every
    lines = {line.number: line for line in chosen}
    records = _parse([lines[number] for number in sorted(lines)], damaged)
    if damaged and not records:
        raise InputError("folder", name_lines(path, damaged), REMEDY)
    if damaged:
        warnings.warn(f"{name_lines(path, sorted(damaged))}, and left out; {REMEDY}", stacklevel=2)
    kept = [records[line.number] for line in fitted if line.number in records]
    return RunRecords(list(records.values()), kept)


REMEDY = "once the run has ended, delete these lines to do without them"


def _lines(path: Path, damaged: list[int]) -> Iterator[Line]:
    """Yield the complete lines of a file; add the numbers of those without a start to a list.

    A line that was cut short at the end is left out.
    """
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
                continue
            for record in _parse([Line(number, 0, "", text)], damaged).values():
                yield Line(number, record.update, record.split, text)  # of another program


def _parse(lines: list[Line], damaged: list[int]) -> dict[int, Record]:
    """Return the records by the numbers of their lines; add those of damaged lines to a list."""
    records = {}
    for line in lines:
        found, bad = parse_records(line.text)
        if bad:
            damaged.append(line.number)
        else:
            records[line.number] = found[0]
    return records
