"""Damaged text files of a run: found, named, and rebuilt from the checkpoint where they can be."""

import json
import os
import random
from contextlib import suppress
from dataclasses import replace

import pytest
from half_done import flip_bit, half_done, replace_in

from ghostbatch import train
from ghostbatch.errors import InputError
from ghostbatch.train import read_header, read_records, read_summary
from ghostbatch.train.record import parse_records

DICE = random.Random(0)  # noqa: S311 (no secret)

# -------------------------------------------------------------------------------------- the summary


def flip_a_digit_of_the_accuracy(path):
    at = path.read_bytes().index(b'"accuracy": ') + len(b'"accuracy": ')
    flip_bit(path, 8 * at)


def empty(path):
    path.write_text("")


def no_utf8(path):
    path.write_bytes(b"\xff\xfe")


def text_for_a_number(path):
    fields = json.loads(path.read_text())
    del fields["checksum"]
    path.write_text(json.dumps({**fields, "accuracy": "97"}))


DAMAGES = [flip_a_digit_of_the_accuracy, empty, no_utf8, text_for_a_number]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_run_with_a_damaged_summary_ends_again_with_the_same_numbers(
    tiny, tmp_path, outcome, damage
):
    train(tiny, out=tmp_path)
    before = outcome(tmp_path)
    damage(tmp_path / "summary.json")
    with pytest.raises(InputError, match=r"^folder: .*summary.json .*; run its command again"):
        read_summary(tmp_path / "summary.json")
    with pytest.warns(
        UserWarning, match=r"summary.json .*; it is written again from the last checkpoint"
    ) as warned:
        train(tiny, out=tmp_path)
    assert len(warned) == 1
    assert outcome(tmp_path) == before


def test_a_diverged_run_with_a_damaged_summary_diverges_again(tiny, tmp_path):
    hot = replace(tiny, regime=replace(tiny.regime, lr=1e25, drops=()), clip=None)
    reason = train(hot, out=tmp_path).reason
    empty(tmp_path / "summary.json")
    with pytest.warns(UserWarning, match="it is written again from the last checkpoint"):
        assert train(hot, out=tmp_path).reason == reason


def test_no_flipped_bit_of_a_summary_changes_what_is_read(tiny, tmp_path):
    summary = train(tiny, out=tmp_path)
    path = tmp_path / "summary.json"
    content = path.read_bytes()
    for bit in DICE.sample(range(8 * len(content)), 300):
        flip_bit(path, bit)
        with suppress(InputError):
            assert read_summary(path) == summary
        path.write_bytes(content)


# ----------------------------------------------------------------------------------------- run.json


def test_a_flipped_thread_count_is_noticed_and_rebuilt(tiny, tmp_path, outcome):
    """Another number of threads would round differently."""
    train(tiny, out=tmp_path / "whole", threads=1)
    folder = tmp_path / "cut"
    half_done(tiny, folder, threads=1)
    before = read_header(folder)
    replace_in(folder / "run.json", b'"threads": 1', b'"threads": 3')
    with pytest.raises(InputError, match=r"^out: .*run.json has changed since .*; run its command"):
        read_header(folder)
    with pytest.warns(UserWarning, match=r"run.json .*; it was rebuilt from the check") as warned:
        train(tiny, out=folder)
    assert len(warned) == 1
    assert read_header(folder) == before
    assert outcome(folder) == outcome(tmp_path / "whole")


@pytest.mark.parametrize("damage", [empty, no_utf8, os.unlink])
def test_a_lost_run_json_of_an_ended_run_is_rebuilt(tiny, tmp_path, damage):
    summary = train(tiny, out=tmp_path)
    before = read_header(tmp_path)
    damage(tmp_path / "run.json")
    with pytest.warns(UserWarning, match=r"run.json .*; it was rebuilt from the checkpoint"):
        assert train(tiny, out=tmp_path) == summary
    assert read_header(tmp_path) == before


def test_a_lost_run_json_that_no_checkpoint_holds_is_refused_and_nothing_written(tiny, tmp_path):
    half_done(tiny, tmp_path)
    (tmp_path / "run.json").unlink()
    (tmp_path / "checkpoint.previous.pt").unlink()
    empty(tmp_path / "checkpoint.pt")
    with pytest.raises(InputError, match=r"^out: .*run.json is missing, and no checkpoint of this"):
        train(tiny, out=tmp_path)
    assert not (tmp_path / "run.json").exists()


def test_a_run_json_is_never_rebuilt_for_another_recipe(tiny, tmp_path):
    train(tiny, out=tmp_path)
    empty(tmp_path / "run.json")
    with pytest.raises(InputError, match=r"^out: .*run.json cannot be read, and no checkpoint of"):
        train(replace(tiny, seed=1), out=tmp_path)
    assert (tmp_path / "run.json").read_text() == ""


def test_no_flipped_bit_of_run_json_changes_what_is_read(tiny, tmp_path):
    train(tiny, out=tmp_path)
    header = read_header(tmp_path)
    path = tmp_path / "run.json"
    content = path.read_bytes()
    for bit in DICE.sample(range(8 * len(content)), 300):
        flip_bit(path, bit)
        with suppress(InputError):  # with a flipped name, the checksum is one field more
            assert header.items() <= read_header(tmp_path).items()
        path.write_bytes(content)


# -------------------------------------------------------------------------------------- the records


def test_a_run_with_a_damaged_record_continues_and_says_which(tiny, tmp_path, outcome):
    train(tiny, out=tmp_path / "whole")
    folder = tmp_path / "cut"
    half_done(tiny, folder)
    metrics = folder / "metrics.jsonl"
    lines = metrics.read_bytes().split(b"\n")
    lines[2] = lines[2].replace(b'"loss": 2', b'"loss": 3')
    metrics.write_bytes(b"\n".join(lines))
    with pytest.warns(UserWarning, match=r"^line 3 of .*metrics.jsonl is damaged; the") as warned:
        train(tiny, out=folder)
    assert len(warned) == 1
    there, here = outcome(tmp_path / "whole"), outcome(folder)
    assert {**here, "metrics": None} == {**there, "metrics": None}
    with pytest.raises(InputError, match=r"^folder: line 3 of .*metrics.jsonl is damaged; once"):
        read_records(metrics)
    whole = read_records(tmp_path / "whole" / "metrics.jsonl")
    assert read_records(metrics, skip_damaged=True) == whole[:2] + whole[3:]


def test_every_flipped_bit_of_a_record_is_noticed(tiny, tmp_path):
    train(tiny, out=tmp_path)
    lines = (tmp_path / "metrics.jsonl").read_bytes().splitlines(keepends=True)[:3]
    content = bytearray(b"".join(lines))
    assert parse_records(bytes(content))[1] == []
    for bit in range(8 * (len(content) - 1)):  # without the last line feed a line is incomplete
        content[bit // 8] ^= 1 << bit % 8
        assert parse_records(bytes(content))[1] != [], bit
        content[bit // 8] ^= 1 << bit % 8


GOOD = '{"update": 1, "epoch": 0.5, "split": "train", "loss": 1, "accuracy": 9.5, "lr": 0.1, '


@pytest.mark.parametrize(
    "line",
    [
        GOOD + '"distance": "far"}',
        GOOD + '"distance": true}',
        GOOD + '"distance": [1]}',
        GOOD + '"distance": 1' + 400 * "0" + "}",
        GOOD + '"distance": 2, "clipped": "no"}',
        GOOD + '"distance": 2, "other": 1}',
        GOOD.replace("1, ", "1.5, ", 1) + '"distance": 2}',
        GOOD.replace('"train"', '"mine"') + '"distance": 2}',
        GOOD[:-2] + "}",
        "[1]",
        "7",
        "",
        "\udcff",
    ],
    ids=range(13),
)
def test_a_line_that_is_no_record_is_refused_by_its_number(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    good = (GOOD + '"distance": 2}\n').encode()
    path.write_bytes(good)
    (record,) = read_records(path)
    assert (record.update, record.loss, record.distance) == (1, 1.0, 2.0)
    path.write_bytes(good + line.encode(errors="surrogateescape") + b"\n" + good)
    with pytest.raises(InputError, match=r"^folder: line 2 of .*metrics.jsonl is damaged; "):
        read_records(path)


# ------------------------------------------------------------------------------------ special files


@pytest.mark.parametrize(
    "name",
    ["run.json", "summary.json", "metrics.jsonl", "checkpoint.pt", "checkpoint.previous.pt"],
)
def test_a_fifo_among_the_files_is_refused_instead_of_read_for_ever(tiny, tmp_path, name):
    half_done(tiny, tmp_path)
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    with pytest.raises(InputError, match=rf"^out: .*{name} is not a regular file; remove it"):
        train(tiny, out=tmp_path)
    assert (tmp_path / name).is_fifo()


@pytest.mark.parametrize(
    ("read", "name"),
    [(read_records, "metrics.jsonl"), (read_summary, "summary.json")],
)
def test_the_readers_refuse_a_fifo_too(tmp_path, read, name):
    os.mkfifo(tmp_path / name)
    with pytest.raises(InputError, match=f"{name} is not a regular file"):
        read(tmp_path / name)
