"""The command line: what it prints, and how it refuses."""

import json
import subprocess
import sys

import pytest

import ghostbatch
from ghostbatch import cli
from ghostbatch.errors import RankLocalError
from ghostbatch.study import PROVISIONAL


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """Run a command in an empty folder; return its exit code and what it printed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GHOSTBATCH_DATA", raising=False)

    def call(*words):
        monkeypatch.setattr(sys, "argv", ["ghostbatch", *words])
        code = 0
        try:
            cli.main()
        except SystemExit as stop:
            code = stop.code or 0
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return call


BAD = {
    "command": "fly",
    "recipe": "train f9-digits",
    "recipe ": "plan",
    "study": "study slow",
    "columns": "study quick --columns SB,+XX",
    "seeds": "study quick --seeds one",
    "jobs": "study quick --jobs 0",
    "folder": "report nowhere",
    "model": "train f1-digits --model vgg99",
    "data": "train f1-digits --data letters",
    "data ": "train f1-mnist",
    "data  ": "train f1-digits --data synthetic:3x32",
    "model ": "train f1-digits --model python:nothing",
    "batch": "train f1-digits --batch 1",
    "batch ": "train f1-digits --batch 4001 --base-batch 32",
    "batch  ": "plan f1-digits --batch 4096",
    "ghost": "train f1-digits --ghost 1",
    "ghost ": "train f1-digits --ghost 33",
    "ghost  ": "train f1-digits --ghost many",
    "noise": "train f1-digits --noise --base-batch 64",
    "clip": "train f1-digits --clip 0",
    "regime.lr": "train f1-digits --regime.lr -0.1",
    "regime.lr ": "train f1-digits --regime.lr nan",
    "regime.weight_decay": "train f1-digits --regime.weight-decay inf",
    "regime.momentum": "train f1-digits --regime.momentum 1.5",
    "regime.epochs": "train f1-digits --regime.epochs 0 --regime.drops ,",
    "regime.warmup": "train f1-digits --regime.warmup 5",
    "regime.drops": "train f1-digits --regime.drops 3:0.1,2:0.01",
    "regime.drops ": "train f1-digits --regime.drops 4:0.1",
    "regime.drops  ": "train f1-digits --regime.drops 1:-0.1",
    "regime.drops   ": "train f1-digits --regime.drops soon",
    "lr-rule": "train f1-digits --lr-rule cubic",
    "device": "train f1-digits --device quantum",
    "bathc": "train f1-digits --bathc 64",
    "threads": "train f1-digits --threads -1",
    "evaluations": "train f1-digits --evaluations 0",
    "out": "train f1-digits --out /dev/null/run",
    "out ": "study quick --out /dev/null/study",
    "regime.epochs ": "train f1-digits --regime.epochs 1/0",
    "regime.drops    ": "train f1-digits --regime.drops 1/0:0.1",
    "device ": "train f1-digits --device meta",
    "batch   ": "plan f1-digits",
}


@pytest.mark.parametrize("field", BAD)
def test_bad_input_is_one_line_with_the_field_and_a_remedy(run, tmp_path, field):
    code, out, err = run(*BAD[field].split())
    assert code == 2
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith(f"ghostbatch: {field.strip()}: ")
    assert "; " in err
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_another_recipe_is_refused(run, tmp_path):
    words = "train f1-digits --regime.epochs 0.05 --regime.drops , --out here --device cpu".split()
    assert run(*words)[0] == 0
    before = {path: path.read_bytes() for path in (tmp_path / "here").iterdir()}
    code, _, err = run(*words, "--seed", "1")
    assert code == 2
    assert "belongs to another recipe (seed differ)" in err
    assert {path: path.read_bytes() for path in (tmp_path / "here").iterdir()} == before


def test_plan_prints_both_recipes_as_json(run):
    code, out, _ = run("plan", "f1-digits", "--batch", "1024", "--json")
    plans = json.loads(out)
    assert code == 0
    assert plans["original"] | plans["adapted"] == plans["adapted"]  # the same fields
    assert plans["original"]["batch"] == 32
    assert plans["original"]["updates"] == plans["adapted"]["updates"] == 500
    assert plans["adapted"]["lr"] == pytest.approx(0.05 * 32**0.5)
    assert plans["adapted"]["drops"][0] == [64, pytest.approx(0.005 * 32**0.5)]
    assert plans["adapted"]["epochs"] == 128
    assert (plans["original"]["ghosts"], plans["adapted"]["ghosts"]) == (1, 32)


def test_plan_can_be_without_ghosts_and_for_a_smaller_batch(run):
    _, out, _ = run("plan", "f1-digits", "--batch", "1024", "--ghost", "None", "--json")
    assert json.loads(out)["adapted"]["ghost"] is None
    _, out, _ = run("plan", "f1-digits", "--batch", "16", "--json")
    assert json.loads(out)["adapted"]["ghost"] == 16


def test_the_version_is_told(run):
    assert run("--version") == (0, f"ghostbatch {ghostbatch.__version__}\n", "")


def test_plan_holds_epochs_when_asked(run):
    _, out, _ = run("plan", "f1-digits", "--batch", "1024", "--hold", "epochs", "--json")
    adapted = json.loads(out)["adapted"]
    assert (adapted["updates"], adapted["epochs"], adapted["drop_updates"]) == (16, 4, [8, 12])


def test_plan_prints_both_recipes_side_by_side(run):
    _, out, _ = run("plan", "f1-digits", "--batch", "1024")
    lines = [line.split() for line in out.splitlines()]
    assert ["original", "adapted"] in lines
    assert ["updates", "500", "500"] in lines
    assert ["epochs", "4", "128"] in lines


def test_list_names_everything(run):
    _, out, _ = run("list")
    for name in ("f1-digits", "wresnet16-4-cifar100", "quick", "f1", "digits", "fashion-mnist"):
        assert f"  {name} " in out


def test_list_marks_the_recipes_that_are_provisional(run):
    _, out, _ = run("list")
    marked = {line.split()[0] for line in out.splitlines() if line.endswith("(provisional)")}
    assert marked == PROVISIONAL


def test_plan_needs_no_files_of_the_data_set(run):
    _, out, _ = run("plan", "resnet44-cifar10", "--batch", "4096", "--json")
    plans = json.loads(out)
    assert plans["original"]["updates"] == plans["adapted"]["updates"] == 78_125
    assert plans["adapted"]["drop_updates"] == [31_641, 47_656, 64_063]


def test_train_takes_every_field_of_the_recipe_as_a_flag(run, tmp_path):
    code, out, _ = run(
        *"train f1-digits --batch 64 --ghost 16 --lr-rule sqrt --hold updates --seed 3".split(),
        *"--regime.epochs 0.1 --regime.drops 1/20:0.01:0 --running mean --clip None".split(),
        *"--precision fp64 --augment --out run --device cpu --evaluations 2".split(),
    )
    assert code == 0
    recipe = json.loads((tmp_path / "run" / "run.json").read_text())["recipe"]
    assert recipe["regime"]["drops"] == [["1/20", 0.01, 0.0]]
    assert recipe["clip"] is None
    assert (recipe["batch"], recipe["ghost"], recipe["running"]) == (64, 16, "mean")
    assert "finished: accuracy" in out


def test_help_shows_the_fields_own_words(run):
    code, out, _ = run("train", "f1-digits", "--help")
    assert code == 0
    assert "The batch that the regime was tuned for." in " ".join(out.split())
    for command in ("plan f1-digits", "study quick", "report"):
        assert run(*command.split(), "--help")[0] == 0
    assert "usage: ghostbatch COMMAND" in run("--help")[1]


def test_the_module_runs_as_the_command_does():
    done = subprocess.run(
        [sys.executable, "-m", "ghostbatch", "list"], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("recipes\n  f1-digits")


def test_ranks_other_than_the_first_say_only_what_they_alone_may_meet(run, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    assert run("train", "f9-digits") == (2, "", "")

    def full(_words):
        raise RankLocalError("micro", "64 samples do not fit", "use micro 32")

    monkeypatch.setitem(cli.COMMANDS, "train", full)
    assert run("train") == (2, "", "ghostbatch: micro: 64 samples do not fit; use micro 32\n")
