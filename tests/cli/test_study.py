"""``ghostbatch study``: its selectors, their folders, and the five columns of a recipe."""

import json
from pathlib import Path

import pytest

from ghostbatch.cli import study as command
from ghostbatch.study import read_study
from ghostbatch.study.select import scaled
from ghostbatch.study.studies import columns


@pytest.fixture
def plan(run, monkeypatch):
    """Return a function from a study's flags to its cells, folder and declaration; none is run."""
    seen = []

    def note(study, cells, out, **_):
        seen.append((sorted(f"{cell.row} {cell.column}" for cell in cells), str(out), study))
        return []

    monkeypatch.setattr(command, "run_study", note)
    monkeypatch.setattr(command, "print_report", lambda *_: None)

    def ask(words):
        code, _, err = run("study", *(word.replace("by-d", "by d") for word in words.split()))
        assert code == 0, err
        return seen.pop()

    return ask


@pytest.mark.parametrize(
    ("words", "folder"),
    [
        ("quick", "quick"),
        ("quick --columns SB --seeds 0 --rows f1-digits", "quick"),
        ("quick --scale 1.0", "quick"),
        ("quick --scale 0.5", "quick-scale-0.5"),
        ("figure1 --data cifar100 --scale 1e-1", "figure1-scale-0.1-data-cifar100"),
        ("columns f1-digits --batch 512", "columns-f1-digits-batch-512-ghost-32"),
        ("--batch 512 columns --ghost=16 f1-digits", "columns-f1-digits-batch-512-ghost-16"),
        ("columns f1-mnist", "columns-f1-mnist-batch-4096-ghost-128"),
    ],
)
def test_each_selection_of_recipes_has_its_own_folder(plan, words, folder):
    assert plan(words)[1] == f"runs/{folder}"
    assert plan(f"{words} --out here")[1] == "here"


def test_a_folder_says_what_its_long_name_has_lost_by_a_hash(plan):
    data = "synthetic:3x32x32x10:5000"
    first, second = (plan(f"figure1 --data {data} --scale {scale}")[1] for scale in (0.1, 0.2))
    assert first != second
    assert ":" not in first
    assert len(Path(first).name) <= 60


def test_rows_and_columns_select_cells(plan):
    cells, _, study = plan("table1 --rows c1-cifar10,f1-mnist --columns SB,+RA --seeds 0")
    assert cells == ["c1-cifar10 +RA", "c1-cifar10 SB", "f1-mnist +RA", "f1-mnist SB"]
    assert len(study.rows) == 6


@pytest.mark.parametrize(
    ("words", "measured"),
    [
        ("diffusion", ["potential"]),
        ("diffusion --holdout 500 --scale 0.5", ["potential"]),
        ("diffusion --rows before", []),
        ("diffusion --rows by-distance", ["potential"]),
        ("diffusion --rows by-distance --columns SB", ["potential"]),
        ("diffusion --rows by-distance --columns +RA", []),
        ("diffusion --rows by-distance --seeds 1,2", []),
        ("figure-b", ["potential"]),
        ("walk", ["walk"]),
    ],
)
def test_an_instrument_is_measured_only_with_the_run_that_has_its_recipe(
    plan, monkeypatch, words, measured
):
    names = []
    monkeypatch.setattr(command, "measure", lambda instrument, *_: names.append(instrument.name))
    plan(words)
    assert names == measured


def test_rows_on_other_data_are_called_after_these(plan):
    cells, _, study = plan("table1 --data mnist --rows f1-mnist --columns SB --seeds 0 --scale 0.1")
    assert cells == ["f1-mnist SB"]
    assert study.scale == 0.1
    assert study.rows["resnet44-mnist"].columns["SB"].regime.epochs == 20


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("table1 --data mnist", "data: mnist does not fit the row vgg-mnist: 28 is too small"),
        ("table1 --rows f1", "rows: 'f1' is unknown; choose one of f1-mnist, c1-cifar10"),
        ("quick --scale 0", "scale: 0 is not above 0; use 0.1, for example"),
        ("quick --scale x", "scale: 'x' is not a number"),
        ("walk --scale 0.1", "scale: walk has no runs; leave it out"),
        ("walk --rows a", "rows: walk has no runs; leave it out"),
        ("walk --holdout 10", "holdout: walk has no runs; leave it out"),
        ("walk --precision bf16", "precision: walk has no runs; leave it out"),
        ("walk --warmup 1", "warmup: walk has no runs; leave it out"),
        ("quick --batch 64", "batch: there is no flag --batch"),
        ("columns", "recipe: no name was given; choose one of f1-digits"),
        ("columns f9", "recipe: 'f9' is unknown"),
        ("columns f1-digits f1-mnist", "recipe: 2 names were given"),
        ("columns f1-digits", "batch: f1-digits LB: 4096 is above the 4000 training samples"),
        ("quick --jobs -1", "jobs: -1 is below 0; use 0 or more"),
        ("quick --ranks 0", "ranks: 0 is below 1"),
        ("quick --ranks 0 --dry-run", "ranks: 0 is below 1"),
        (
            "quick --micro 48",
            "micro: f1-digits +RA seed 0: batch 512 does not split",
        ),
        ("quick --micro 48 --dry-run", "micro: f1-digits +RA seed 0: batch 512 does not split"),
        ("columns f1-digits --batch 64 --ghost 65", "ghost: 65 is above batch 64"),
    ],
)
def test_wrong_selections_are_refused_in_one_line_and_write_nothing(run, words, line, tmp_path):
    code, _, err = run("study", *words.split())
    assert code == 2
    assert err.startswith(f"ghostbatch: {line}")
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_help_of_the_columns_names_the_recipes_and_the_sizes(run):
    for words in ("columns --help", "columns f1-mnist --help"):
        code, out, _ = run("study", *words.split())
        assert code == 0
        assert "--batch INT" in out
        assert "f1-mnist" in out
        assert "ghostbatch train" not in out


def test_the_columns_of_a_recipe_run_to_their_ends_at_a_small_scale(run, tmp_path):
    words = "columns f1-digits --batch 256 --scale 0.05 --columns LB,+RA --seeds 0 --jobs 1"
    code, out, err = run("study", *words.split(), "--device", "cpu")
    assert code == 0, err
    home = tmp_path / "runs" / "columns-f1-digits-batch-256-ghost-32-scale-0.05"
    updates = {}
    for path in home.glob("f1-digits/*/seed-0/summary.json"):
        summary = json.loads(path.read_text())
        assert summary["status"] == "finished"
        updates[path.parts[-3]] = summary["updates"]
    declared = scaled(columns("f1-digits", 256, 32), 0.05).cells(["SB", "LB"], [0])
    planned = {cell.column: cell.plan.updates for cell in declared}
    assert updates == {"LB": planned["LB"], "+RA": planned["SB"]}
    assert read_study(home).scale == 0.05
    assert "+RA" in out
    code, _, err = run("study", *words.replace("0.05", "0.1").split(), "--out", str(home))
    assert code == 2
    assert err.startswith("ghostbatch: out: the folder holds runs at scale 0.05, not 0.1; choose")
