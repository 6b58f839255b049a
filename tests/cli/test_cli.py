"""The command line: what it prints, and how it refuses."""

import inspect
import json
import re
import subprocess
import sys
from dataclasses import fields

import pytest
from image_folder import write_images

import ghostbatch
from ghostbatch.cli.train import RunOptions
from ghostbatch.errors import RankLocalError
from ghostbatch.study import Failure

BAD_INPUT = {  # the field that the error names, and the command
    "unknown-command": ("command", "fly"),
    "unknown-recipe": ("recipe", "train f9-digits"),
    "unknown-study": ("study", "study slow"),
    "unknown-column": ("columns", "study quick --columns SB,+XX"),
    "seed-is-a-word": ("seeds", "study quick --seeds one"),
    "no-jobs": ("jobs", "study quick --jobs -1"),
    "jobs-here-and-ray": ("ray", "study quick --jobs 0 --ray local"),
    "ranks-here": ("ranks", "study quick --jobs 0 --ranks 2"),
    "no-folder": ("folder", "report nowhere"),
    "unknown-model": ("model", "train f1-digits --model vgg99"),
    "unknown-data": ("data", "train f1-digits --data letters"),
    "missing-data": ("data", "train f1-mnist"),
    "synthetic-shape-of-two": ("data", "train f1-digits --data synthetic:3x32"),
    "python-model-without-function": ("model", "train f1-digits --model python:nothing"),
    "batch-of-one": ("batch", "train f1-digits --batch 1"),
    "batch-above-data": ("batch", "train f1-digits --batch 4001 --base-batch 32"),
    "planned-batch-above-data": ("batch", "plan f1-digits --batch 4096"),
    "ghost-of-one": ("ghost", "train f1-digits --ghost 1"),
    "ghost-above-batch": ("ghost", "train f1-digits --ghost 33"),
    "ghosts-without-batch-norm": (
        "ghost",
        "train f1-digits --ghost 16 --model python:small_networks:without_norms",
    ),
    "ghosts-of-unknown-norms": (
        "ghost",
        "train f1-digits --ghost 16 --model python:small_networks:other_norms",
    ),
    "noise-below-base-batch": ("noise", "train f1-digits --noise --base-batch 64"),
    "clip-at-zero": ("clip", "train f1-digits --clip 0"),
    "nan-lr": ("regime.lr", "train f1-digits --regime.lr nan"),
    "infinite-weight-decay": ("regime.weight_decay", "train f1-digits --regime.weight-decay inf"),
    "momentum-above-one": ("regime.momentum", "train f1-digits --regime.momentum 1.5"),
    "no-epochs": ("regime.epochs", "train f1-digits --regime.epochs 0 --regime.drops ,"),
    "warmup-beyond-the-end": ("regime.warmup", "train f1-digits --regime.warmup 10"),
    "drops-out-of-order": ("regime.drops", "train f1-digits --regime.drops 3:0.1,2:0.01"),
    "drop-at-the-end": ("regime.drops", "train f1-digits --regime.drops 9:0.1"),
    "drop-to-a-negative-lr": ("regime.drops", "train f1-digits --regime.drops 1:-0.1"),
    "unknown-lr-rule": ("lr-rule", "train f1-digits --lr-rule cubic"),
    "unknown-device": ("device", "train f1-digits --device quantum"),
    "negative-threads": ("threads", "train f1-digits --threads -1"),
    "no-evaluations": ("evaluations", "train f1-digits --evaluations 0"),
    "run-below-a-file": ("out", "train f1-digits --out /dev/null/run"),
    "study-below-a-file": ("out", "study quick --out /dev/null/study"),
    "study-on-a-missing-gpu": ("device", "study quick --device cuda:99"),
    "study-on-an-unknown-device": ("device", "study quick --device quantum"),
    "study-without-threads": ("threads", "study quick --threads 0"),
    "study-with-empty-micro-batches": ("micro", "study quick --micro 0"),
    "epochs-over-zero": ("regime.epochs", "train f1-digits --regime.epochs 1/0"),
    "drop-epoch-over-zero": ("regime.drops", "train f1-digits --regime.drops 1/0:0.1"),
    "device-that-cannot-train": ("device", "train f1-digits --device meta"),
    "image-size-of-digits": ("image_size", "train f1-digits --image-size 28"),
    "holdout-of-all-digits": ("holdout", "train f1-digits --holdout 4000"),
    "holdout-below-zero": ("holdout", "train f1-digits --holdout -1"),
    "growth-with-held-updates": ("grow", "plan f1-digits --batch 32 --grow 512"),
    "growth-above-data": ("grow", "train f1-digits --grow 4096"),
    "no-such-run": ("from", "train --from nowhere"),
    "study-as-a-run": ("from", "train --from ."),
    "recipe-and-run": ("from", "train --from nowhere f1-digits"),
    "out-is-empty": ("out", "train f1-digits --out="),
    "data-dir-is-empty": ("data-dir", "train f1-digits --data-dir="),
    "study-out-is-empty": ("out", "study quick --out="),
    "negative-seed": ("seed", "train f1-digits --seed -1"),
    "negative-seeds": ("seeds", "study quick --seeds 1,-1"),
    "one-negative-seed": ("seeds", "study quick --seeds -1"),
    "checkpoint-at-nan": ("checkpoint_seconds", "train f1-digits --checkpoint-seconds nan"),
    "checkpoint-at-infinity": ("checkpoint_seconds", "train f1-digits --checkpoint-seconds inf"),
    "checkpoint-before-now": ("checkpoint_seconds", "train f1-digits --checkpoint-seconds -1"),
    "study-with-checkpoints-at-nan": (
        "checkpoint_seconds",
        "study quick --checkpoint-seconds nan",
    ),
    "lr-beyond-fp32": ("regime.lr", "train f1-digits --regime.lr 1e39"),
    "lr-overflows": ("regime.lr", "train f1-digits --regime.lr 1e308 --batch 64 --lr-rule linear"),
    "lr-overflows-in-fp64": (
        "regime.lr",
        "train f1-digits --regime.lr 1e308 --batch 64 --lr-rule linear --precision fp64",
    ),
    "drop-beyond-fp32": ("regime.drops", "train f1-digits --regime.drops 1:1e39"),
    "decay-beyond-fp32": ("regime.weight_decay", "train f1-digits --regime.weight-decay 1e39"),
    "no-run-to-evaluate": ("run", "evaluate nowhere"),
    "no-run-to-export": ("run", "export nowhere --to network.pt"),
    "export-of-unknown-ending": ("to", "export nowhere --to network.h5"),
    "export-into-no-folder": ("to", "export nowhere --to no/network.pt"),
}


@pytest.mark.parametrize(("field", "command"), BAD_INPUT.values(), ids=BAD_INPUT)
def test_bad_input_is_one_line_with_the_field_and_a_remedy(run, tmp_path, field, command):
    code, out, err = run(*command.split())
    assert code == 2
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith(f"ghostbatch: {field}: ")
    assert "; " in err
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_another_recipe_is_refused(run, tmp_path):
    words = "train f1-digits --regime.epochs 0.05 --regime.drops , --out here --device cpu".split()
    assert run(*words)[0] == 0
    before = {path: path.read_bytes() for path in (tmp_path / "here").iterdir()}
    for more in ([], ["--dry-run"]):
        code, _, err = run(*words, "--seed", "1", *more)
        assert code == 2
        assert "belongs to another recipe (other seed)" in err
    assert {path: path.read_bytes() for path in (tmp_path / "here").iterdir()} == before


def test_plan_prints_both_recipes_as_json(run):
    code, out, _ = run("plan", "f1-digits", "--batch", "1024", "--json")
    plans = json.loads(out)
    assert code == 0
    assert plans["original"] | plans["adapted"] == plans["adapted"]  # the same fields
    assert plans["original"]["batch"] == 32
    assert plans["original"]["updates"] == plans["adapted"]["updates"] == 1125
    assert plans["adapted"]["lr"] == pytest.approx(0.00625 * 32**0.5)
    assert plans["adapted"]["drops"][0] == [144, pytest.approx(6.25e-4 * 32**0.5)]
    assert plans["adapted"]["epochs"] == 288
    assert (plans["original"]["ghosts"], plans["adapted"]["ghosts"]) == (1, 32)


def test_the_ghosts_of_a_smaller_batch_are_no_larger_than_it(run):
    _, out, _ = run("plan", "f1-digits", "--batch", "16", "--json")
    assert json.loads(out)["adapted"]["ghost"] == 16


def test_the_version_is_printed(run):
    assert run("--version") == (0, f"ghostbatch {ghostbatch.__version__}\n", "")


def test_plan_holds_epochs_when_asked(run):
    _, out, _ = run("plan", "f1-digits", "--batch", "1024", "--hold", "epochs", "--json")
    adapted = json.loads(out)["adapted"]
    assert (adapted["updates"], adapted["epochs"], adapted["drop_updates"]) == (35, 9, [18, 26])


def test_plan_holds_the_sum_of_learning_rates_when_asked(run):
    """32 times the batch, a rate 32 ** 0.5 times as high: that many times fewer updates."""
    _, out, _ = run("plan", "f1-digits", "--batch", "1024", "--hold", "rate", "--json")
    adapted = json.loads(out)["adapted"]
    assert (adapted["updates"], adapted["drop_updates"]) == (199, [99, 149])
    assert adapted["epochs"] == pytest.approx(9 * 32**0.5)


def test_plan_shows_the_batch_of_every_phase(run):
    words = "plan f1-digits --batch 32 --ghost 16 --hold epochs --grow 1024".split()
    _, out, _ = run(*words, "--json")
    plans = json.loads(out)
    assert plans["original"]["batches"] == [32, 32, 32]
    assert plans["adapted"]["batches"] == [32, 320, 1024]
    assert plans["adapted"]["drop_updates"] == [563, 591]  # 1125 batches: 563, 28 * 10 and 9 * 32
    assert plans["adapted"]["updates"] == 600
    _, out, _ = run(*words)
    shown = dict(re.split("  +", line.strip())[::2] for line in out.splitlines()[2:])
    assert shown["batch"] == "32 (0), 320 (563), 1,024 (591)"
    assert shown["rates (update)"] == "0.00625 (0), 0.00625 (563), 0.002 (591)"


def test_plan_prints_both_recipes_side_by_side(run):
    _, out, _ = run("plan", "f1-digits", "--batch", "1024")
    lines = [line.split() for line in out.splitlines()]
    assert ["original", "adapted"] in lines
    assert ["updates", "1,125", "1,125"] in lines
    assert ["epochs", "9", "288"] in lines


def test_list_names_everything(run):
    _, out, _ = run("list")
    for name in ("f1-digits", "wresnet16-4-cifar100", "quick", "f1", "digits", "fashion-mnist"):
        assert f"  {name} " in out


def test_plan_does_not_read_the_data_set(run):
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


def test_help_shows_the_documentation_of_the_fields(run):
    code, out, _ = run("train", "f1-digits", "--help")
    assert code == 0
    assert "The batch that the regime was tuned for." in " ".join(out.split())
    for command in ("plan f1-digits", "study quick", "report", "evaluate", "export", "advise"):
        assert run(*command.split(), "--help")[0] == 0


def test_the_package_runs_as_a_module():
    done = subprocess.run(
        [sys.executable, "-m", "ghostbatch", "list"], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("recipes\n  f1-digits")


def test_other_ranks_print_only_the_errors_that_one_rank_alone_may_have(run, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    assert run("train", "f9-digits") == (2, "", "")

    def out_of_memory(_words):
        raise RankLocalError("micro", "64 samples do not fit", "use micro 32")

    monkeypatch.setattr("ghostbatch.cli.train.command", out_of_memory)
    assert run("train") == (2, "", "ghostbatch: micro: 64 samples do not fit; use micro 32\n")


def test_failed_cells_are_listed_after_the_table_with_exit_code_1(run, monkeypatch, tmp_path):
    def fail_one(_study, cells, _out, *, on_event, **_):
        failure = Failure(cells[0].name, "its worker died 3 times, the last time by SIGKILL")
        on_event(cells[0], failure)
        return [failure]

    monkeypatch.setattr("ghostbatch.cli.study.run_study", fail_one)
    monkeypatch.setattr("ghostbatch.cli.study.print_report", lambda *_: print("the table"))
    words = ("study", "quick", "--columns", "SB", "--seeds", "0", "--out", str(tmp_path))
    code, out, err = run(*words)
    assert code == 1
    assert re.fullmatch(r"\[1/1\] f1-digits SB seed 0: failed, .*\nthe table\n", out)
    assert err.splitlines() == [
        "ghostbatch: f1-digits SB seed 0 failed: its worker died 3 times, the last time by SIGKILL",
        "ghostbatch: one part of the study failed; run the same command again to try again",
    ]


def test_a_study_in_which_everything_failed_has_no_table_but_its_list(run, monkeypatch, tmp_path):
    failures = [Failure("one", "broken"), Failure("two", "broken")]
    monkeypatch.setattr("ghostbatch.cli.study.run_study", lambda *_, **__: failures)
    code, _, err = run("study", "quick", "--out", str(tmp_path))
    assert code == 1
    assert [line.removeprefix("ghostbatch: ")[:12] for line in err.splitlines()] == [
        *("folder: " + str(tmp_path)[:4], "one failed: ", "two failed: ", "2 parts of t"),
    ]


def test_an_instrument_that_cannot_be_measured_is_listed_and_the_study_is_reported(
    run, monkeypatch, tmp_path
):
    (tmp_path / "walk.json").write_text("{")
    monkeypatch.setattr("ghostbatch.cli.study.print_report", lambda *_: print("the table"))
    code, out, err = run("study", "walk", "--out", str(tmp_path))
    assert code == 1
    assert out.endswith("the table\n")
    assert err.startswith(f"ghostbatch: walk failed: folder: {tmp_path}/walk.json cannot be read; ")


def test_every_argument_of_train_is_a_flag():
    """Except those that call back."""
    callbacks = {"on_record", "on_progress", "should_stop"}
    arguments = set(inspect.signature(ghostbatch.train).parameters) - {"recipe", *callbacks}
    assert arguments == {field.name for field in fields(RunOptions)}


SHORT = "train f1-digits --model python:small_networks:narrow --device cpu --evaluations 1".split()
SHORT += "--regime.epochs 0.05 --regime.drops ,".split()


def test_a_folder_whose_name_looks_like_markup_is_printed_and_reported_as_it_is(run, tmp_path):
    """One name has rich's markup and an emoji, the other one a formula of LaTeX."""
    names = {"[/x]:x:": "digits", "$x_$y$": "synthetic:1x28x28:600"}
    for name, data in names.items():
        code, out, err = run(*SHORT, "--data", data, "--out", f"[r]/{name}")
        assert (code, err) == (0, "")
        assert out.endswith(f"; [r]/{name}\n")
    code, out, err = run("report", "[r]", "--figures")
    assert (code, err) == (0, "")
    assert {f"[r]/{name}" for name in names} <= {line.split(" ")[0] for line in out.splitlines()}
    assert out.endswith("report: [r]/report.html\n")
    for name, data in names.items():
        file = f"python-small_networks-narrow-{data.replace(':', '-')}-distance.svg"
        assert f">[r]/{name}<" in (tmp_path / "[r]" / "figures" / file).read_text()


def test_a_diverged_run_exits_with_code_3_also_when_it_is_run_again(run):
    words = [*SHORT, "--regime.lr", "1e15", "--clip", "None"]
    code, out, err = run(*words)
    assert (code, err) == (3, "")
    assert out.splitlines()[-1].startswith("diverged (update ")
    assert run(*words)[0] == 3


def test_held_out_images_reach_the_run_its_estimates_and_its_last_line(run):
    code, out, _ = run(*SHORT, "--holdout", "1000", "--dry-run")
    assert code == 0
    assert {("holdout", "1000"), ("updates", "5")} <= {  # 0.05 * 3000 / 32
        tuple(line.split()) for line in out.splitlines()
    }
    code, out, _ = run(*SHORT, "--holdout", "1000", "--out", "run")
    assert code == 0
    assert re.search(r"^finished: accuracy [\d.]+ % on held-out images after 5 updates", out, re.M)
    _, out, _ = run("evaluate", "run", "--device", "cpu")
    assert out.startswith("python:small_networks:narrow on digits (held-out images) after update 5")
    assert "summary.json agrees" in out


def test_the_image_size_reaches_the_run_its_estimates_and_run_json(run, tmp_path):
    write_images(tmp_path / "images")
    words = "train f1-digits --model python:small_networks:narrow --data folder:images".split()
    words += "--batch 4 --base-batch 4 --device cpu --regime.epochs 0.5 --regime.drops ,".split()
    code, out, _ = run(*words, "--image-size", "9", "--dry-run")
    parameters = 3 * 9 * 9 * 32 + 32 + 64 + 32 * 32 + 32 + 64 + 32 * 3 + 3
    assert code == 0
    assert {("image_size", "9"), ("parameters", f"{parameters:,}")} <= {
        tuple(line.split()) for line in out.splitlines()
    }
    assert run(*words, "--image-size", "9", "--out", "run")[0] == 0
    assert json.loads((tmp_path / "run" / "run.json").read_text())["recipe"]["image_size"] == 9
    code, _, err = run(*words, "--image-size", "8", "--out", "run")
    assert "other image_size" in err
