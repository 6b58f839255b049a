"""What commands show of runs and studies when their output is piped."""

import json
import re
from collections import Counter

import pytest

from ghostbatch.data import find_info
from ghostbatch.files import read_regular
from ghostbatch.recipes import RECIPES
from ghostbatch.study import Cost, find_study
from ghostbatch.train import Summary, read_records
from ghostbatch.train.record import write_summary

SHORT = "train f1-digits --model python:small_networks:narrow --device cpu --threads 1".split()
SHORT += "--evaluations 4 --regime.epochs 0.2 --regime.drops 0.1:0.005 --out run".split()
CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f]")


def banner(out):
    """Return the values of the banner by name, and the lines after it."""
    lines = out.splitlines()
    count = next(n for n, line in enumerate(lines) if line.startswith(" "))
    return dict(line.split(maxsplit=1) for line in lines[:count]), lines[count:]


def test_train_says_what_it_will_do_and_then_shows_both_losses_of_every_evaluation(run, tmp_path):
    code, out, err = run(*SHORT)
    said, (header, *lines, last) = banner(out)
    assert (code, err) == (0, "")
    assert said == {
        "recipe": "f1-digits: python:small_networks:narrow, fp32, seed 0",
        "data": "digits: 4,000 training images",
        "device": "cpu, 1 thread, engine: eager",
        "updates": "25 of 32 images each, no ghosts; 0.2 epochs",
        "rates": "0.00625 (0), 0.005 (13): learning rate (from update)",
        "folder": "run: a new run",
        "losses": "training: mean since the record before; validation: the whole test set",
    }
    assert re.split("  +", header.strip()) == [
        *("update", "epoch", "lr", "training loss", "validation loss", "accuracy %", "distance"),
    ]
    records = read_records(tmp_path / "run" / "metrics.jsonl")
    training = {r.update: f"{r.loss:.4f}" for r in records if r.split == "train"}
    evaluated = [r for r in records if r.split == "validation"]
    assert [line.split()[3:5] for line in lines] == [
        [training.get(r.update, "-"), f"{r.loss:.4f}"] for r in evaluated
    ]
    assert {len(line) for line in (header, *lines)} == {len(header)}
    assert len(header) <= 80
    assert last.startswith("finished: accuracy ")


def test_train_says_how_its_batch_grows(run):
    growing = [*SHORT[:-4], "--regime.drops", "0.1:0.002", "--grow", "96", "--ghost", "8"]
    code, out, err = run(*growing, "--out", "run")
    said, lines = banner(out)
    assert (code, err) == (0, "")
    assert said["updates"] == (
        "17 of 32 (0), 96 (13) images each, 4 ghosts of 8 per 32; 0.2 epochs"
    )
    assert said["rates"].startswith("0.00625 (0), 0.006 (13): ")
    epochs = {int(update): float(epoch) for update, epoch, *_ in map(str.split, lines[1:-1])}
    assert (epochs[10], epochs[17]) == (0.08, 0.2)
    assert {6, 12, 15, 17} <= epochs.keys()  # after quarters of 25 batches: 6, 12, 19 and 25
    _, out, _ = run(*growing, "--dry-run")
    assert "batch            32 (0), 96 (13)" in out


def test_train_says_that_it_evaluates_on_held_out_images(run):
    said, _ = banner(run(*SHORT, "--holdout", "1000")[1])
    assert said["data"] == "digits: 3,000 training images"
    assert said["losses"].endswith("; validation: 1,000 held-out training images")


def test_train_tells_a_run_that_ended_now_from_one_that_had_ended(run):
    first, again = (run(*SHORT)[1].splitlines() for _ in range(2))
    assert first[-1].startswith("finished: accuracy ")
    assert again == [f"was {first[-1].replace('finished', 'finished already', 1)}"]
    diverging = [*SHORT[:-1], "hot", "--regime.lr", "1e15", "--clip", "None"]
    first, again = (run(*diverging)[1].splitlines() for _ in range(2))
    assert first[-1].startswith("diverged (update ")
    assert again == [first[-1].replace("diverged", "had diverged already", 1)]


def test_train_says_where_it_continues(run, monkeypatch):
    def interrupt(_progress, record):
        if record.update > 5:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("ghostbatch.cli.train.TrainProgress.on_record", interrupt)
        assert run(*SHORT, "--checkpoint-updates", "1")[0] == 130
    said, (_, *lines, _) = banner(run(*SHORT)[1])
    assert said["folder"] == "run: continues after update 5"
    assert int(lines[0].split()[0]) > 5


@pytest.mark.parametrize("setting", [{"COLUMNS": "40"}, {"TERM": "dumb"}, {"NO_COLOR": "1"}, {}])
def test_piped_output_has_no_control_characters_and_nothing_is_cut_or_wrapped(
    run, monkeypatch, setting
):
    for name, value in setting.items():
        monkeypatch.setenv(name, value)
    out = run(*SHORT)[1]
    assert not CONTROL.search(out)
    assert len(banner(out)[0]) == 7
    plan = run(*"plan resnet44-cifar10 --batch 4096".split())[1]
    rates = "0.5657 (0), 0.05657 (31641), 0.005657 (47656), 0.0005657 (64063)"
    assert f"0.1 (0), 0.01 (31641), 0.001 (47656), 0.0001 (64063)  {rates}" in plan
    assert not CONTROL.search(plan)


def test_list_shows_what_each_recipe_and_study_costs(run):
    lines = {line.split()[0]: line for line in run("list")[1].splitlines() if line[:2] == "  "}
    assert " 78,125 updates     10,000,000 images  ResNet44 " in lines["resnet44-cifar10"]
    # Three seeds: four columns of 9 epochs, and +RA with 1,125 updates of 512.
    updates, images = 3 * (2 * 1125 + 3 * 70), 3 * (1125 * 32 + 3 * 70 * 512 + 1125 * 512)
    cost = Cost(find_study("quick").cells())
    assert (cost.updates, cost.images) == (updates, images)
    assert f"15 runs {updates:>9,} updates {images:>14,} images  " in lines["quick"]
    assert "no training runs" in lines["walk"]


def test_list_prints_json(run):
    tables = json.loads(run("list", "--json")[1])
    assert list(tables) == ["recipes", "studies", "networks", "data_sets"]
    recipes = {entry["name"]: entry for entry in tables["recipes"]}
    for name, entry in recipes.items():
        recipe = RECIPES[name]()
        assert entry["updates"] == recipe.plan(find_info(recipe.data).samples).updates
        assert entry["images"] == entry["updates"] * recipe.batch
    quick = next(entry for entry in tables["studies"] if entry["name"] == "quick")
    assert quick["runs"] == 15
    assert all(entry["about"] for table in tables.values() for entry in table)


def end_cells(cells, out):
    """Write the files that say that cells have ended."""
    for cell in cells:
        folder = cell.folder(out)
        folder.mkdir(parents=True)
        header = {"recipe": cell.recipe.as_dict(), "samples": 4000, "device": "cpu", "threads": 1}
        (folder / "run.json").write_text(json.dumps(header))
        summary = Summary(
            status="finished", accuracy=90, loss=1, updates=1, epochs=1, distance=1, seconds=1
        )
        write_summary(folder / "summary.json", summary)


def test_a_dry_run_of_a_study_counts_only_what_is_left_and_writes_nothing(
    run, monkeypatch, tmp_path
):
    monkeypatch.setattr(
        "ghostbatch.cli.study.measure_cost",
        lambda cells, *_: Cost(cells, dict.fromkeys(cells, 110.0), places=2),
    )
    words = ("study", "quick", "--columns", "SB", "--out", "out", "--dry-run")
    line = "3 runs to do: 3,375 updates, 108,000 images, about 3 minutes on this machine\n"
    assert run(*words) == (0, line, "")
    assert list(tmp_path.iterdir()) == []
    end_cells(find_study("quick").cells(["SB"], [0, 1]), tmp_path / "out")
    line = "1 run to do: 1,125 updates, 36,000 images, about 110 seconds on this machine\n"
    assert run(*words) == (0, line, "")
    assert run(*words, "--seeds", "0,1") == (0, "no runs to do\n", "")


def test_resuming_1000_ended_cells_takes_a_few_readings_of_each_and_one_line(
    run, monkeypatch, tmp_path
):
    seeds = range(200)
    monkeypatch.setattr("ghostbatch.files.os.fsync", lambda _: None)
    end_cells(find_study("quick").cells(seeds=seeds), tmp_path / "out")
    read = Counter()

    def count(path):
        read[path] += 1
        return read_regular(path)

    monkeypatch.setattr("ghostbatch.files.read_regular", count)
    monkeypatch.setattr("ghostbatch.cli.study.print_report", lambda *_: None)
    code, out, err = run(
        *("study", "quick", "--out", "out", "--seeds", ",".join(map(str, seeds))),
    )
    assert (code, out, err) == (0, "1,000 of 1,000 runs had ended already\n", "")
    assert len(read) == 2000
    assert max(read.values()) <= 3
