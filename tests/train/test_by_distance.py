"""A run that drops its rate where another one's weights had got to."""

import json
import re
import shutil
from dataclasses import replace
from math import inf

import pytest
from half_done import half_done

from ghostbatch import Regime, train
from ghostbatch.errors import InputError
from ghostbatch.report.page import write_report
from ghostbatch.report.table import HEADERS
from ghostbatch.study import Row, Study
from ghostbatch.study.manifest import write_study
from ghostbatch.train.header import read_header
from ghostbatch.train.record import read_records
from ghostbatch.train.reference import read_drop_targets


@pytest.fixture
def small(tiny):
    """The small batch: 32 updates, with a drop in the middle."""
    return replace(tiny, batch=32, lr_rule="none")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return tmp_path_factory.mktemp("reference")


@pytest.fixture
def reference(small, finished):
    train(small, out=finished)  # once; afterwards it has ended
    return finished


def following(recipe, folder, **changes):
    return replace(recipe, hold="distance", reference=str(folder), **changes)


def changed(folder, copy, distance):
    """A copy of a run whose distances are others."""
    shutil.copytree(folder, copy)
    records = [json.loads(line) for line in (copy / "metrics.jsonl").read_text().splitlines()]
    for record in records:
        record["distance"] = distance(record["update"])
        del record["crc"]
    lines = map(json.dumps, records)
    (copy / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return copy


def test_every_drop_has_a_record_of_its_distance(reference):
    assert 16 in {r.update for r in read_records(reference / "metrics.jsonl")}


def test_the_rate_drops_when_the_reference_distance_is_reached(tiny, reference, tmp_path):
    there = {r.update: r.distance for r in read_records(reference / "metrics.jsonl")}
    summary = train(following(tiny, reference), out=tmp_path, evaluations=1)
    records = [r for r in read_records(tmp_path / "metrics.jsonl") if r.split == "train"]
    fast = [r for r in records if r.lr == tiny.regime.lr * 2**0.5]
    slow = [r for r in records if r.lr == pytest.approx(0.005 * 2**0.5)]
    assert len(fast) + len(slow) == len(records)
    drop = fast[-1]  # written because the rate drops there
    assert drop.distance >= there[16] > fast[-2].distance
    assert drop.update != 16
    assert summary.updates == drop.update + 16 == records[-1].update  # the reference's last phase


@pytest.mark.parametrize("stop", [2, 13])
def test_an_interrupted_run_ends_bit_identical_even_without_its_reference(
    tiny, reference, tmp_path, outcome, stop
):
    copy = shutil.copytree(reference, tmp_path / "reference")
    recipe = following(tiny, copy)
    half_done(recipe, tmp_path / "cut", stop)
    train(recipe, out=tmp_path / "whole")
    shutil.rmtree(copy)
    train(recipe, out=tmp_path / "cut")
    assert outcome(tmp_path / "cut") == outcome(tmp_path / "whole")


def test_a_distance_that_is_never_reached_ends_after_twice_the_updates(tiny, reference, tmp_path):
    far = changed(reference, tmp_path / "far", lambda update: 1000.0 + update)
    recipe = following(tiny, far)
    plan = recipe.plan(4000)
    assert (plan.phases, plan.drop_updates, plan.updates) == ((16, 16), (32,), 48)
    records = []
    summary = train(recipe, on_record=records.append)
    assert summary.updates == 48
    assert max(r.update for r in records if r.lr == plan.regime.lr) == 32


def test_a_phase_in_which_the_reference_settles_is_as_long_as_its_own(small, reference, tmp_path):
    regime = Regime(lr=0.05, epochs=0.256, drops=((0.064, 0.02), (0.128, 0.005), (0.192, 0.001)))
    walk = {8: 3.0, 16: 3.1, 24: 3.9}
    folder = changed(
        reference, tmp_path / "r", lambda update: walk.get(update, 4.0 if update else 0.0)
    )
    with_fields(**replace(small, regime=regime).as_dict())(folder)
    targets = read_drop_targets(following(small, folder, regime=regime).plan(4000))
    assert targets == ((3.0, inf, 3.9), (16, 8, 16))


def flip_a_digit(folder):
    """In the distance of a record; the drop would come too early or too late."""
    path = folder / "metrics.jsonl"
    lines = path.read_text().split("\n")
    lines[2] = re.sub(r'("distance": \d*)\d', r"\g<1>9", lines[2])
    path.write_text("\n".join(lines))


def with_fields(**changes):
    """Return a function that changes the recipe in a run.json."""

    def change(folder):
        header = read_header(folder)
        header["recipe"] |= changes
        (folder / "run.json").write_text(json.dumps(header))

    return change


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (shutil.rmtree, "holds no run"),
        (lambda folder: (folder / "summary.json").unlink(), "has not finished"),
        (lambda folder: (folder / "metrics.jsonl").unlink(), "cannot be read"),
        (flip_a_digit, "line 3 of .*metrics.jsonl cannot be read"),
        (with_fields(model="c1"), "has another model"),
        (with_fields(normalisation="authors"), "has another normalisation"),
        (
            with_fields(batch=64),
            r"has phases of \(8, 8\) updates, but this recipe needs \(16, 16\)",
        ),
        (
            with_fields(hold="distance", reference="runs/first"),
            "follows another run; name that one: runs/first",
        ),
    ],
    ids=range(8),
)
def test_a_reference_that_cannot_be_followed_is_refused_and_nothing_written(
    tiny, reference, tmp_path, spoil, problem
):
    copy = shutil.copytree(reference, tmp_path / "reference")
    spoil(copy)
    with pytest.raises(InputError, match=rf"^reference: .*{problem}"):
        train(following(tiny, copy), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_seeds_that_took_different_times_are_reported_together(tiny, reference, tmp_path):
    far = changed(reference, tmp_path / "elsewhere", lambda update: 1000.0 + update)
    for seed, folder in ((0, reference), (1, far)):
        recipe = following(tiny, folder, seed=seed)
        train(recipe, out=tmp_path / "study" / "row" / "+D" / f"seed-{seed}")
    write_study(Study("study", {"row": Row({"+D": recipe})}, seeds=(0, 1)), tmp_path / "study")
    page, (table,) = write_report(tmp_path / "study")
    updates = [
        json.loads(path.read_text())["updates"] for path in tmp_path.rglob("seed-*/summary.json")
    ]
    assert len(set(updates)) == 2
    assert table.lines[0][HEADERS.index("updates")] == f"{sum(updates) / 2:.0f}"
    assert "(at most 32)" in page.read_text()
