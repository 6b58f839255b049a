"""Of long runs a report reads a part, in little memory; of others everything."""

import json
import tracemalloc
from dataclasses import replace
from math import nan

import numpy as np
import pytest

from ghostbatch.diagnostics import log_spaced
from ghostbatch.errors import InputError
from ghostbatch.files import add_crc
from ghostbatch.report.records import ALL, EVENLY, PER_DECADE, read_run_records
from ghostbatch.train import Record, read_records
from ghostbatch.train.record import to_json

RECORD = Record(update=0, epoch=0.5, split="train", loss=1, accuracy=50.0, lr=0.1, distance=1.5)


@pytest.fixture
def written(tmp_path):
    """Return a function that writes train records of updates 1 to count, and a validation."""

    def write(count):
        path = tmp_path / "metrics.jsonl"
        lines = [to_json(replace(RECORD, split="validation"))]
        head, tail = to_json(RECORD).split('"update": 0')
        lines += [f'{head}"update": {update}{tail}' for update in range(1, count + 1)]
        path.write_text("\n".join(lines) + "\n")
        return path

    return write


def test_a_short_file_is_read_completely(written):
    path = written(ALL - 1)
    shown, spaced = read_run_records(path, ALL)
    assert shown == read_records(path)
    assert [r.update for r in spaced] == [t for t in log_spaced(10**9) if t < ALL]


def test_a_long_file_is_shown_at_steps_of_log_time_and_at_equal_steps(written):
    path = written(count := 20_000)
    shown, spaced = read_run_records(path, count)
    every = {(r.split, r.update): r for r in read_records(path)}
    assert all(every[r.split, r.update] == r for r in shown)
    assert [r.update for r in shown] == sorted({r.update for r in shown})
    assert shown[0].split == "validation"
    assert shown[-1].update == count
    assert len(shown) < 5 * PER_DECADE + EVENLY + 100
    times = np.array([r.update for r in shown[1:]])
    assert np.diff(np.log10(times[times > 100])).max() < 1.1 / PER_DECADE
    assert np.diff(times).max() <= count / EVENLY + 1
    assert [r.update for r in spaced] == [t for t in log_spaced(10**9) if t <= count]


def test_records_with_checksums_are_read_as_one_by_one(written, tmp_path):
    plain = read_records(written(30))
    varied = [
        replace(plain[1], gradient_norm=1.5, clipped=0.0),
        *plain,
        replace(plain[0], noise_scale=90.0, noise_scale_low=80.0, sharpness=2.5),
        replace(plain[2], loss=nan),
    ]
    for records in (plain, varied[:-1], varied, varied[:1]):
        path = tmp_path / "checked.jsonl"
        path.write_text("".join(add_crc(to_json(record)) + "\n" for record in records))
        assert repr(read_run_records(path, 30).shown) == repr(records)
    lines = path.read_text().replace('"loss": 1', '"loss": 2')
    path.write_text(lines)
    with pytest.raises(InputError, match=r"^folder: line 1 of .*checked.jsonl is damaged"):
        read_run_records(path, 30)


def test_memory_does_not_grow_with_the_file(written):
    path = written(50_000)
    assert path.stat().st_size > 6 * 2**20
    tracemalloc.start()
    try:
        read_run_records(path, 5000)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 3 * 2**20


def test_a_last_line_that_was_cut_short_is_left_out(written):
    path = written(4)
    path.write_bytes(path.read_bytes()[:-3])
    assert [r.update for r in read_run_records(path, 3).shown] == [0, 1, 2, 3]


@pytest.mark.parametrize("count", [20, 2 * ALL])
def test_a_damaged_line_is_named_and_left_out(written, count):
    path = written(count)
    lines = path.read_bytes().split(b"\n")
    intact = read_run_records(path, 5000)
    path.write_bytes(b"\n".join([*lines[:9], b'\xff{"update"', *lines[10:]]))
    with pytest.warns(UserWarning, match=rf"^line 10 of {path} is damaged, and left out"):
        found = read_run_records(path, 5000)
    lost = json.loads(lines[9])["update"]
    assert lost in [record.update for record in intact.shown]
    assert lost not in [record.update for record in found.shown if record.split == "train"]
    if count < 1000:
        assert len(found.shown) == len(intact.shown) - 1
    path.write_bytes(b"\xff\n")
    with pytest.raises(InputError, match=rf"^folder: line 1 of {path} is damaged"):
        read_run_records(path, 5000)


def test_lines_of_another_program_are_read_too(written):
    path = written(3)
    path.write_text(path.read_text().replace(": ", ":"))
    assert [r.update for r in read_run_records(path, 3).shown] == [0, 1, 2, 3]


def test_no_file_is_no_records_and_a_folder_is_refused(tmp_path):
    assert read_run_records(tmp_path / "metrics.jsonl", 1) == ([], [])
    with pytest.raises(InputError, match="is not a regular file"):
        read_run_records(tmp_path, 1)
