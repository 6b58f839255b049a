"""Names and flags: their order, their values, what wrong ones are told, and the help."""

import json

import pytest

from ghostbatch.cli.train import TrainOptions
from ghostbatch.cli.words import field_types
from ghostbatch.recipes import RECIPES
from ghostbatch.study import STUDIES

REFUSALS = {  # the words after "train f1-digits", and the line
    "--lr 0.1": "lr: there is no flag --lr; did you mean --regime.lr?",
    "--gost 32": "gost: there is no flag --gost; did you mean --ghost?",
    "--epochs 3": "epochs: there is no flag --epochs; did you mean --regime.epochs?",
    "--learning-rate 1": "learning-rate: there is no flag --learning-rate; "
    "did you mean --regime.lr?",
    "--regime.wieght-decay 0": "regime.wieght-decay: there is no flag --regime.wieght-decay; "
    "did you mean --regime.weight-decay?",
    "--regime.batch 64": "regime.batch: there is no flag --regime.batch; did you mean --batch?",
    "--optimizer adam": "optimizer: 'adam' is unknown; did you mean adamw? "
    "choose one of sgd, adamw, lars, lamb",
    "--optimizer.kind sgd": "optimizer.kind: there is no flag --optimizer.kind; "
    "use --optimizer.nesterov or --optimizer.beta1 or --optimizer.beta2 or --optimizer.eps or "
    "--optimizer.trust",
    "--optimizer.beta2 0.9": "optimizer.beta2: sgd has no such option; "
    "use --optimizer.nesterov, or set --optimizer",
    "--optimizer lars --optimizer.no-nesterov": "optimizer.nesterov: lars has no such option; "
    "use --optimizer.trust, or set --optimizer",
    "--optimizer lamb --regime.momentum 0.5": "regime.momentum: 0.5 was given, "
    "and lamb has betas in its place; leave it out, or set optimizer.beta1",
    "--optimizer adamw --batch 512 --lr-rule sqrt": "batch: 512 is 16 x base_batch, "
    "which scales Adam's beta of 0.9 to -0.6; use 320 or less, larger betas, or lr_rule linear",
    "-batch 64": "batch: there is no flag -batch; did you mean --batch?",
    "--frobnicate": "frobnicate: there is no flag --frobnicate; see ghostbatch train --help",
    "--": "flags: there is no flag --; see ghostbatch train --help",
    "--batch 1e3": "batch: '1e3' is not a whole number; write 1000",
    "--batch 1,000": "batch: '1,000' is not a whole number; write 1000",
    "--batch 12.5": "batch: '12.5' is not a whole number; give a whole number such as 32",
    "--batch nan": "batch: 'nan' is not a whole number; give a whole number such as 32",
    "--batch": "batch: its value is missing; give a whole number such as 32",
    "--batch --seed 1": "batch: its value is missing; give a whole number such as 32",
    "--batch -5": "batch: -5 is below 2; use 2 or more samples",
    "--ghost many": "ghost: 'many' is not a whole number; give a whole number such as 32 or None",
    "--micro 0": "micro: 0 is below 1; leave micro out, or set a ghost size that divides it",
    "--regime.lr 0,1": "regime.lr: '0,1' is not a number; write 0.1",
    "--regime.lr fast": "regime.lr: 'fast' is not a number; give a number such as 0.1",
    "--regime.lr -0.1": "regime.lr: -0.1 is out of range; use a finite number, 0 or more",
    "--regime.epochs long": "regime.epochs: 'long' is not a number; "
    "give a number such as 0.5 or a fraction such as 50/3",
    "--regime.drops 1:2:3:4": "regime.drops: '1:2:3:4' is not a drop; "
    "write EPOCH:LR or EPOCH:LR:WEIGHT_DECAY, for example 81:0.01,122:0.001",
    "--hold update": "hold: 'update' is unknown; did you mean updates? "
    "choose one of epochs, updates, distance, rate",
    "--augment true": "augment: this flag takes no value; write --augment or --no-augment",
    "--optimizer.no-nesterov=1": "optimizer.no-nesterov: this flag takes no value; "
    "write --optimizer.nesterov or --optimizer.no-nesterov",
    "f1-mnist": "recipe: 2 names were given, f1-digits and f1-mnist; give one",
}


@pytest.mark.parametrize(("words", "line"), REFUSALS.items(), ids=REFUSALS)
def test_wrong_words_are_told_what_to_write(run, tmp_path, words, line):
    assert run("train", "f1-digits", *words.split()) == (2, "", f"ghostbatch: {line}\n")
    assert list(tmp_path.iterdir()) == []


def test_a_regime_flag_that_is_not_there_lists_those_that_are(run):
    _, _, err = run("train", "f1-digits", "--regime.foo", "3")
    regime = [name for name in field_types(TrainOptions) if name.startswith("regime.")]
    assert err.endswith(f"; use {' or '.join(f'--{name}' for name in regime)}\n")
    assert len(regime) == 8


@pytest.mark.parametrize(
    ("command", "names"), [("train", RECIPES), ("plan", RECIPES), ("study", STUDIES)]
)
def test_a_command_without_a_name_lists_the_names(run, command, names):
    line = f"no name was given; choose one of {', '.join(names)}\n"
    assert run(command)[2].endswith(line)
    assert run(command, "--threads", "1")[0] == 2


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("list all", "list: 'all' is one name too many; leave it out"),
        ("report", "folder: no name was given; write ghostbatch report FOLDER"),
        ("report one two", "folder: 'two' is one name too many; leave it out"),
        ("plan f1-digits", "batch: this flag is required; give a whole number such as 32"),
        ("study quick --seed 1", "seed: there is no flag --seed; did you mean --seeds?"),
        (
            "study quick --gost 32",
            "gost: there is no flag --gost; see ghostbatch study --help",
        ),
    ],
)
def test_other_commands_are_told_what_to_write_too(run, words, line):
    assert run(*words.split()) == (2, "", f"ghostbatch: {line}\n")


def test_the_help_of_an_optimizer_shows_its_own_options(run):
    code, out, err = run("train", "f1-digits", "--help", "--optimizer", "adamw")
    assert (code, err) == (0, "")
    assert "--optimizer.beta2" in out
    assert "--optimizer.nesterov" not in out
    assert "--optimizer.trust" not in out
    assert run("train", "f1-digits", "--optimizer", "--help")[0] == 0


def test_flags_may_stand_before_the_name(run):
    flags = "--batch 64 --augment --regime.lr=0.2 --lr_rule sqrt --dry-run --device cpu".split()
    settings = [
        [line for line in run(*words)[1].splitlines() if not line.startswith("time")]
        for words in (("train", *flags, "f1-digits"), ("train", "f1-digits", *flags))
    ]
    assert settings[0] == settings[1]
    assert ["batch", "64"] in [line.split() for line in settings[0]]
    code, out, _ = run("plan", "--json", "--batch", "1024", "f1-digits")
    assert code == 0
    assert json.loads(out)["adapted"]["batch"] == 1024


def test_a_study_takes_its_flags_before_the_name(run, monkeypatch):
    seen = []

    def note(_study, cells, *_, **__):
        seen.extend(cells)

    monkeypatch.setattr("ghostbatch.cli.study.run_study", note)
    monkeypatch.setattr("ghostbatch.cli.study.print_report", lambda *_: None)
    assert run("study", "--seeds", "7", "--columns", "SB", "quick")[0] == 0
    assert [cell.name for cell in seen] == ["f1-digits SB seed 7"]


def test_the_last_of_two_equal_flags_counts(run):
    _, out, _ = run(*"plan f1-digits --batch 512 --batch 1024 --json --no-json --json".split())
    assert json.loads(out)["adapted"]["batch"] == 1024


@pytest.mark.parametrize("none", ["none", "None", "NONE"])
def test_none_is_none_in_any_case(run, none):
    _, out, _ = run("plan", "f1-digits", "--batch", "1024", "--ghost", none, "--json")
    assert json.loads(out)["adapted"]["ghost"] is None


def test_help_shows_the_documentation_and_the_defaults_of_the_recipe(run):
    code, out, err = run("train", "wresnet16-4-cifar100", "--help")
    text = " ".join(out.replace("│", " ").split())
    assert (code, err) == (0, "")
    assert "The batch that the regime was tuned for. (default: 256)" in text
    assert "Weight decay at the start. (default: 0.0005)" in text
    assert "its small batch is 256" in text
    assert "{None}" not in text


@pytest.mark.parametrize("command", ["train", "plan", "study"])
def test_help_without_a_name_shows_the_flags_and_the_names(run, command):
    code, out, _ = run(command, "--help")
    text = " ".join(out.split())
    assert code == 0
    assert out.startswith(
        f"usage: ghostbatch {command} {'STUDY' if command == 'study' else 'RECIPE'} "
    )
    assert f" is one of {', '.join(STUDIES if command == 'study' else RECIPES)};" in text
    assert {"train": "--regime.lr", "plan": "--batch", "study": "--columns"}[command] in text
    assert ("defaults below are those of f1-digits" in text) == (command == "train")


def test_help_of_a_study_says_what_it_expects_and_costs(run):
    lines = [line.strip() for line in run("study", "quick", "--help")[1].splitlines()]
    assert "Command: ghostbatch study quick." in lines
    assert any(line.startswith("Expected: SB 95.8,") for line in lines)
    assert any(line.startswith("Cost: 1:58 minutes on two cores") for line in lines)
    assert "Columns: SB, LB, +LR, +GBN, +RA." in lines


def test_help_is_given_whatever_else_is_wrong(run):
    for wrong in (["--bathc", "x"], ["--augment=true"], ["--batch", "many"]):
        assert run("train", "f1-digits", *wrong, "-h")[0] == 0
    assert run("report", "--help")[0] == 0
    assert "usage: ghostbatch COMMAND" in run("--help")[1]
