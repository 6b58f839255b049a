"""Where a run goes by default, and runs that repeat another one."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from ghostbatch import Recipe, Regime, train
from ghostbatch.cli.default_out import folder_of, folder_of_repeat
from ghostbatch.optim import SGD, AdamW, LAMBSpec, LARSSpec
from ghostbatch.recipes import find_recipe

BASE = find_recipe("f1-digits")
SHORT = "--regime.epochs 0.05 --regime.drops , --device cpu".split()


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({}, "f1-digits"),
        ({"batch": 64}, "f1-digits-batch-64"),
        ({"batch": 64, "ghost": 16, "seed": 3}, "f1-digits-batch-64-ghost-16-seed-3"),
        ({"regime": replace(BASE.regime, lr=0.2)}, "f1-digits-lr-0.2"),
        ({"regime": replace(BASE.regime, drops=())}, "f1-digits-drops-none"),
        ({"augment": True, "clip": None}, "f1-digits-clip-none-augment"),
        ({"optimizer": SGD(nesterov=True)}, "f1-digits-nesterov"),
        ({"optimizer": LAMBSpec()}, "f1-digits-optimizer-lamb"),
        ({"optimizer": LARSSpec(trust=0.1)}, "f1-digits-optimizer-lars-trust-0.1"),
    ],
)
def test_the_folder_is_named_by_what_was_changed(changes, name):
    assert folder_of("f1-digits", BASE, replace(BASE, **changes)) == Path("runs", name)


def test_changes_that_a_name_cannot_hold_are_hashed():
    long = {"lr_rule": "sqrt", "ghost": 16, "hold": "updates", "running": "mean", "clip": 1.0}
    recipes = [
        *(replace(BASE, data=f"synthetic:{shape}") for shape in ("1x28x28", "1x28x28x2:99")),
        *(replace(BASE, batch=64, **long, seed=seed) for seed in range(3)),
        replace(BASE, regime=Regime(lr=0.05, epochs=4, drops=((1, 0.005),))),
        replace(BASE, regime=Regime(lr=0.05, epochs=4, drops=((1, 0.005, 0.0),))),
    ]
    folders = [folder_of("f1-digits", BASE, recipe) for recipe in recipes]
    assert folders == [folder_of("f1-digits", BASE, recipe) for recipe in recipes]
    assert len(set(folders)) == len(recipes)
    for folder in folders:
        assert len(folder.name) <= 60
        assert set(folder.name) <= set("abcdefghijklmnopqrstuvwxyz0123456789.-")
    assert folders[2].name.startswith("f1-digits-batch-64-lr-rule-sqrt-ghost-16-")


def test_another_experiment_has_its_own_folder_and_the_same_command_continues(run, tmp_path):
    assert run("train", "f1-digits", *SHORT)[0] == 0
    code, out, _ = run("train", "f1-digits", *SHORT, "--batch", "64")
    assert code == 0
    assert out.endswith("; runs/f1-digits-batch-64-epochs-0.05-drops-none\n")
    before = (tmp_path / "runs" / "f1-digits-batch-64-epochs-0.05-drops-none" / "run.json").stat()
    again = run("train", "f1-digits", *SHORT, "--batch", "64")[1]
    assert again == out.splitlines(keepends=True)[-1].replace("finished", "was finished already")
    folders = sorted((tmp_path / "runs").iterdir())
    assert [f.name for f in folders] == [
        "f1-digits-batch-64-epochs-0.05-drops-none",
        "f1-digits-epochs-0.05-drops-none",
    ]
    assert (folders[0] / "run.json").stat().st_mtime_ns == before.st_mtime_ns


def test_a_repeated_run_writes_the_same_bytes(run, tiny, tmp_path, outcome):
    run_options = {"threads": 2, "evaluations": 3, "micro": 32, "device": "cpu"}
    train(tiny, out=tmp_path / "first", **run_options)
    code, out, _ = run("train", "--from", "first/run.json")
    assert code == 0
    second = tmp_path / out.rpartition("; ")[2].strip()
    assert second.parent == tmp_path / "runs"
    assert second.name.endswith("-again")
    assert (second / "metrics.jsonl").read_bytes() == (
        tmp_path / "first" / "metrics.jsonl"
    ).read_bytes()
    assert outcome(second) == outcome(tmp_path / "first")
    headers = [json.loads((f / "run.json").read_text()) for f in (tmp_path / "first", second)]
    assert headers[0] == headers[1]


def test_a_repeated_run_measures_what_the_first_one_did(run, tiny, tmp_path):
    train(tiny, out=tmp_path / "first", threads=1, noise_scale=True)
    assert run("train", "--from", "first", "--out", "second")[0] == 0
    records = [(tmp_path / name / "metrics.jsonl").read_bytes() for name in ("first", "second")]
    assert records[0] == records[1]
    assert b"noise_scale" in records[0]


def test_flags_change_a_repeated_run(run, tiny, tmp_path):
    train(tiny, out=tmp_path / "first", threads=1)
    _, out, _ = run(*"train --seed 1 --from first --out second --ghost none --micro none".split())
    assert out.endswith("; second\n")
    header = json.loads((tmp_path / "second" / "run.json").read_text())
    assert header["recipe"] == replace(tiny, seed=1, ghost=None).as_dict()
    assert header["threads"] == 1


def test_a_repetition_never_goes_into_the_folder_that_it_repeats(tiny, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for recipe in (BASE, tiny):
        first = folder_of_repeat(Path("elsewhere"), recipe, recipe)
        assert first.name.endswith("-again")
        assert folder_of_repeat(first, recipe, recipe).name == f"{first.name}-again"
    assert folder_of_repeat(Path("runs/one"), BASE, BASE) == Path("runs/one-again")
    others = {folder_of_repeat(Path(f"{place}/one"), BASE, BASE) for place in ("runs", "a", "b")}
    assert len(others) == 3
    changed = replace(BASE, batch=64)
    assert folder_of_repeat(Path("runs/f1-digits"), BASE, changed).name == "f1-digits-batch-64"


def test_a_run_file_that_cannot_be_read_is_refused_by_the_name_of_the_flag(run, tmp_path):
    (tmp_path / "run.json").write_text("{}")
    code, _, err = run("train", "--from", "run.json")
    assert code == 2
    assert err.startswith("ghostbatch: from: run.json ")
    assert err.endswith("; name another run\n")


def test_a_repetition_may_have_another_optimizer_with_flags_that_it_needs(tiny, run, tmp_path):
    """AdamW could not use the square-root rule of the run that is repeated."""
    steep = replace(tiny, batch=64, base_batch=2, ghost=2)
    train(steep, out=tmp_path / "first", device="cpu")
    words = ("train", "--from", str(tmp_path / "first"), "--optimizer", "adamw")
    code, _, err = run(*words)
    assert code == 2
    assert err.startswith("ghostbatch: batch: 64 is 32 x base_batch, which scales Adam's beta")
    changes = ("--lr-rule", "linear", "--regime.lr", "1e-4", "--optimizer.beta2", "0.9")
    assert run(*words, *changes, "--out", "second")[0] == 0
    written = json.loads((tmp_path / "second" / "run.json").read_text())["recipe"]
    changed = {"optimizer": AdamW(beta2=0.9), "lr_rule": "linear"}
    assert Recipe.from_dict(written) == replace(
        steep, **changed, regime=replace(steep.regime, lr=1e-4)
    )
    assert run("train", "--from", "second", "--dry-run", "--optimizer", "adamw")[0] == 0
