"""One run on many ranks and in micro-batches: the numbers of one rank and one pass."""

import json
import warnings
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import train_variants
from launch_ranks import torchrun

from ghostbatch.files import parse_line
from ghostbatch.train.loop import _load
from ghostbatch.train.ranks import Ranks


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """All variants on one rank, two and four."""
    folder = tmp_path_factory.mktemp("runs")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "None of the inputs have requires_grad")  # in evaluations
        train_variants.run_all(folder, world=1)
    for count in (2, 4):
        done = torchrun(count, Path(train_variants.__file__), folder)
        assert done.returncode == 0, done.stderr[-3000:]
    return folder


CASES = [
    (name, count, micro)
    for name, recipe in train_variants.VARIANTS.items()
    for count in (1, 2, 4)
    for micro in train_variants.micros(recipe)
    if (count, micro) != (1, None)
]


def state(folder):
    return torch.load(folder / "checkpoint.pt", weights_only=True)["state"]


def assert_close(mine, whole, path=""):
    if isinstance(whole, dict):
        assert mine.keys() == whole.keys(), path
        for key in whole:
            assert_close(mine[key], whole[key], f"{path}/{key}")
    elif isinstance(whole, torch.Tensor):
        torch.testing.assert_close(mine, whole, rtol=1e-9, atol=1e-9, msg=path)
    elif not path.endswith("seconds"):
        assert mine == (pytest.approx(whole, rel=1e-9) if isinstance(whole, float) else whole), path


@pytest.mark.parametrize(("name", "count", "micro"), CASES)
def test_weights_statistics_momentum_and_records_are_those_of_one_rank(out, name, count, micro):
    one, many = (out / name / f"{n} ranks" / f"micro {m}" for n, m in ((1, None), (count, micro)))
    assert_close(state(many), state(one))
    lines = [(f / "metrics.jsonl").read_bytes().splitlines() for f in (many, one)]
    for mine, whole in zip(*lines, strict=True):
        assert_close(parse_line(mine), parse_line(whole))
    summaries = [json.loads((f / "summary.json").read_text()) for f in (many, one)]
    assert summaries[0]["recalibrated_accuracy"] == summaries[1]["recalibrated_accuracy"] > 0


def test_the_variants_use_what_they_are_meant_to_test(out):
    """Dropout and crops change the run; clipping acts in some updates and not in others."""
    records = [
        json.loads(line)
        for line in (out / "scaled rate" / "1 ranks" / "micro None" / "metrics.jsonl")
        .read_text()
        .splitlines()
    ]
    clipped = [r["clipped"] for r in records if r["split"] == "train"]
    assert 0 < sum(clipped) / len(clipped) < 1


def test_the_time_out_of_updates_does_not_end_a_download(tiny, monkeypatch):
    """Ranks wait for the one that downloads in a group of its own, with a time-out of its own."""
    waited = []

    def gather(everyone, own, group):
        everyone[:] = [own] * len(everyone)
        waited.append(group)

    monkeypatch.setattr(dist, "new_group", lambda timeout, backend: (timeout, backend))
    monkeypatch.setattr(dist, "destroy_process_group", waited.append)
    monkeypatch.setattr(dist, "all_gather_object", gather)
    _load(tiny, None, True, Ranks(1, 2))
    patient = (timedelta(days=1), "gloo")
    assert waited == [patient, patient, None]  # gathered, destroyed; then loaded as usual
