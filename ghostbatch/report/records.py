"""Reads the records of a run for its figures and fits; of a long run only some.

Figures have logarithmic or linear axes, so they need records at equal steps of log time and at
equal steps. Fits need those that every run has at the same updates, whatever its evaluations: the
updates of `log_spaced`. Only the chosen lines are kept and parsed: a million lines take seconds,
and memory for a few thousand.
"""

import json
import re
import warnings
import zlib
from bisect import bisect
from collections.abc import Iterator
from functools import cache
from math import ceil, log10
from pathlib import Path
from typing import NamedTuple, get_args

from ghostbatch.diagnostics import log_spaced
from ghostbatch.errors import InputError
from ghostbatch.train import Record
from ghostbatch.train.record import MEASURED, Split, name_lines, parse_records

ALL = 600
"""Lines up to which every record is kept."""

PER_DECADE = 30
"""Records kept of each split for each tenfold number of updates, in longer files."""

EVENLY = 100
"""Records kept of each split at equal steps of the update, in longer files."""

LOG_SPACED = frozenset(log_spaced(10**9))
"""The updates after which every run is recorded, besides its evaluations, drops and end."""

LINE = re.compile(rb'\{"update": (\d{1,18}), "epoch": [^,\n]+, "split": "(\w+)"')
"""The beginning of a line of ``metrics.jsonl``."""

REMEDY = "once the run has ended, delete these lines to do without them"


class RunRecords(NamedTuple):
    """The records of a run that a report uses."""

    shown: list[Record]
    """For figures."""
    log_spaced: list[Record]
    """Training records at the updates of `LOG_SPACED`, for fits."""


def read_run_records(path: Path, updates: int) -> RunRecords:
    """Return the records of a ``metrics.jsonl`` for a report; ``updates`` are those of the run.

    Of a file with more than `ALL` lines only the chosen lines are parsed and checked. Damaged lines
    are left out, with a warning; a file without any other line is refused.
    """
    chosen, damaged = _choose(path, _steps(updates))
    records, bad = _parse(chosen)
    damaged = sorted([*damaged, *bad])
    if damaged and not records:
        raise InputError("folder", name_lines(path, damaged), REMEDY)
    if damaged:
        warnings.warn(f"{name_lines(path, damaged)}, and left out; {REMEDY}", stacklevel=2)
    fitted = [r for r in records if r.split == "train" and r.update in LOG_SPACED]
    return RunRecords(records, fitted)


@cache
def _steps(updates: int) -> list[int]:
    """Return the updates at which the steps of log time, and the equal ones, begin."""
    logarithmic = (ceil(10 ** (k / PER_DECADE)) for k in range(ceil(PER_DECADE * log10(updates))))
    even = (ceil(k * updates / EVENLY) for k in range(EVENLY + 1))
    return sorted({*logarithmic, *even, updates})


def _choose(path: Path, steps: list[int]) -> tuple[dict[int, bytes], list[int]]:
    """Return the lines to keep by their numbers, and the numbers of damaged lines.

    Of each split the first line of each step and the last line are kept.
    """
    every: dict[int, bytes] = {}
    chosen: dict[int, bytes] = {}
    last: dict[bytes, tuple[int, bytes]] = {}
    step_of: dict[bytes, int] = {}
    damaged = []
    number = 0
    for number, line in enumerate(_read_lines(path), 1):
        head = LINE.match(line)
        found = head.groups() if head else _unusual_head(line)
        if found is None:
            damaged.append(number)
            continue
        update, split = int(found[0]), found[1]
        if number <= ALL:
            every[number] = line
        step = bisect(steps, update)
        if step != step_of.get(split) or (update in LOG_SPACED and split == b"train"):
            chosen[number] = line
        step_of[split], last[split] = step, (number, line)
    if number <= ALL:
        return every, damaged
    return dict(sorted({**chosen, **dict(last.values())}.items())), damaged


def _read_lines(path: Path) -> Iterator[bytes]:
    """Yield the complete lines of a file; one that was cut short at the end is left out."""
    if not path.exists():
        return
    if not path.is_file():
        raise InputError("folder", f"{path} is not a regular file", "remove it")
    with path.open("rb") as file:
        yield from (line for line in file if line.endswith(b"\n"))


def _unusual_head(line: bytes) -> tuple[int, bytes] | None:
    """Return update and split of a line of another program; None if it is damaged."""
    records, _ = parse_records(line)
    return (records[0].update, records[0].split.encode()) if records else None


def _parse(lines: dict[int, bytes]) -> tuple[list[Record], list[int]]:
    """Return the records of lines by their numbers, and the numbers of those that are damaged."""
    texts, numbers = list(lines.values()), list(lines)
    if (records := _parse_intact(texts)) is not None:
        return records, []
    records, damaged = parse_records(b"".join(texts))
    return records, [numbers[place - 1] for place in damaged]


def _parse_intact(texts: list[bytes]) -> list[Record] | None:
    """Return what `parse_records` does, in a third of the time; None if a line is unusual."""
    bodies = []
    for text in texts:
        body, found, crc = text.rpartition(b', "crc": "')
        if not found or crc != b'%08x"}\n' % zlib.crc32(body):
            return None
        bodies.append(body)
    try:
        every = json.loads(b"[" + b"},".join(bodies) + b"}]")
    except ValueError:
        return None
    usual = len(every) == len(texts) and all(
        tuple(fields)[: len(NAMES)] == NAMES
        and tuple(map(type, fields.values()))[: len(NAMES)] in TYPES
        and fields["split"] in SPLITS
        and all(name in MEASURED for name in list(fields)[len(NAMES) :])
        for fields in every
    )
    return [Record(**fields) for fields in every] if usual else None


NAMES = tuple(name for name in Record.__dataclass_fields__ if name not in MEASURED)
SPLITS = get_args(Split)
TYPES = {(int, float, str, *[float] * 4, *[last] * 2) for last in (float, type(None))}
"""Types of these fields; those of the last two may be None."""
