"""The studies beyond the paper: what was fixed before their runs, and that they run in small."""

import json
from contextlib import nullcontext
from dataclasses import fields, replace
from types import SimpleNamespace

import pytest

from ghostbatch import Recipe
from ghostbatch.errors import InputError
from ghostbatch.optim import SGD
from ghostbatch.report.page import write_report
from ghostbatch.study import beyond as declared
from ghostbatch.study import find_recipe, find_study, read_study, run_study
from ghostbatch.study.beyond import METHODS, Setting, frozen_study, search
from ghostbatch.study.rows import warmed_up
from ghostbatch.study.select import scaled
from ghostbatch.study.targets import target_study


def differing(before, after):
    """Return what two recipes or settings differ in."""
    names = (each.name for each in fields(before))
    return {name for name in names if getattr(before, name) != getattr(after, name)}


@pytest.fixture(autouse=True)
def no_script(monkeypatch):
    """Leave the script of the page empty: bundling it takes seconds."""
    script = SimpleNamespace(text=lambda: "")
    monkeypatch.setattr("ghostbatch.report.page.VegaScript", lambda: nullcontext(script))


@pytest.fixture
def small():
    """A small network on the digits, with the regime of ResNet44."""
    recipe = replace(find_recipe("f1-digits"), model="python:small_networks:narrow")
    return replace(recipe, regime=find_recipe("resnet44-cifar10").regime)


def run(study, out, *, columns=None, rows=None, seeds=(0,)):
    """Run cells of a study in this process; return their summaries by row, column and seed."""
    cells = study.cells(columns, seeds, out, rows)
    assert run_study(study, cells, out, jobs=0, on_event=lambda *_: None) == []
    paths = [cell.folder(out) / "summary.json" for cell in cells]
    return {path.parts[-4:-1]: json.loads(path.read_text()) for path in paths}


@pytest.mark.parametrize("method", METHODS)
def test_every_method_has_sixteen_different_trials(method):
    trials = METHODS[method]()
    assert len(trials) == len(set(map(str, trials.values()))) == 16
    assert {trial.ghost is None for trial in trials.values()} == {method == "plain"}
    if method in ("LARS", "LAMB"):
        assert not any(trial.decay_norms for trial in trials.values())


def test_a_trial_changes_one_factor_of_the_base_point_or_of_cosine():
    trials = METHODS["ghosts"]()
    for name, trial in trials.items():
        base = trials["cosine" if name.startswith("cosine ") else "base"]
        assert len(differing(base, trial)) == (name != "base"), name


def test_the_base_point_is_linear_scaling_with_a_warmup_of_10_epochs_and_ghosts_of_128():
    row = find_study("beyond-search").rows["ghosts"]
    recipe = row.columns["base"]
    plan = recipe.plan(45_000)
    assert plan.regime.lr == pytest.approx(3.2)
    assert (plan.recipe.holdout, plan.ghosts, plan.seen.epochs) == (5000, 32, 200)
    assert plan.rates(109).lr < plan.rates(110).lr == plan.regime.lr  # 10 epochs of 11 updates
    assert [drop[0] for drop in plan.regime.drops] == [81, 122, 164]
    assert differing(find_recipe("resnet44-cifar10"), recipe) == {
        *("batch", "regime", "lr_rule", "ghost", "ema", "holdout")
    }


def test_every_trial_sees_as_many_images_as_the_small_batch():
    images = [cell.images for cell in find_study("beyond-search").cells()]
    small = find_recipe("resnet44-cifar10").plan(45_000)
    assert len(images) == 16 * len(METHODS)
    assert all(abs(each - small.updates * 128) <= 4096 for each in images)


def test_a_setting_gives_the_rate_schedule_decay_and_optimizer_that_it_names(small):
    nesterov = SGD(nesterov=True)
    schedule = {"schedule": "polynomial", "power": 2.0, "warmup": 5, "factor": 0.5}
    setting = Setting(**schedule, weight_decay=0.02, decay_norms=False, optimizer=nesterov)
    recipe = setting.applied(small, 512)
    assert recipe.plan(4000).regime.lr == pytest.approx(0.1 * 0.5 * 512 / 32)
    assert not recipe.decay_norms
    assert (recipe.regime.drops, recipe.regime.power, recipe.regime.warmup) == ((), 2.0, 5)
    assert (recipe.regime.weight_decay, recipe.optimizer) == (0.02, SGD(nesterov=True))
    assert recipe.base_batch == small.base_batch


def test_the_frozen_settings_are_the_same_on_both_networks():
    study = find_study("beyond")
    first, second = study.rows.values()
    for column in second.columns:
        before = find_recipe("resnet44-cifar10")
        after = find_recipe("wresnet16-4-cifar100")
        assert differing(before, first.columns[column]) == differing(after, second.columns[column])
    winner = first.columns["ghosts first"]
    for factor in (2, 4):
        longer = first.columns[f"ghosts first x {factor}"]
        assert longer == replace(winner, regime=winner.regime.stretched(factor))
    assert next(iter(first.columns)) == "SB"
    assert differing(find_recipe("resnet44-cifar10"), first.columns["SB"]) == {"ema"}


def test_provisional_settings_are_not_run_and_chosen_ones_are(monkeypatch, tmp_path):
    study = find_study("beyond")
    with pytest.raises(InputError, match=r"^study: the settings of beyond are provisional; run gh"):
        run_study(study, study.cells(seeds=[0]), tmp_path, jobs=0, on_event=lambda *_: None)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(declared, "CHOSEN", True)
    assert find_study("beyond").provisional == ""


def test_the_search_runs_to_its_end_in_small(small, tmp_path):
    study = scaled(search(small, 512, 500), 0.002)
    ended = run(study, tmp_path, columns=["base", "cosine ghosts 64", "cosine rate x 0.25"])
    assert len(ended) == 4
    assert all(end["held_out"] and end["ema_accuracy"] for end in ended.values())
    text = write_report(tmp_path)[0].read_text()
    assert '<th scope="col">EMA %</th>' in text
    assert "on 500 held-out training images" in text


def test_the_comparison_runs_to_its_end_in_small(small, tmp_path):
    study = scaled(frozen_study({"one": small, "two": small}, 512), 0.002)
    ended = run(study, tmp_path, columns=["SB", "ghosts first", "ghosts first x 2"])
    updates = {place[:2]: end["updates"] for place, end in ended.items()}
    assert updates["one", "SB"] == updates["two", "SB"] == 50
    assert updates["one", "ghosts first x 2"] == 2 * updates["one", "ghosts first"] == 6
    text = write_report(tmp_path)[0].read_text()
    assert "EMA, gap to SB" in text
    assert text.count("Time to the accuracy of SB") >= 2
    header = json.loads((tmp_path / "one" / "SB" / "seed-0" / "run.json").read_text())
    assert header["evaluations"] == 100


def test_the_targets_run_to_their_ends_in_small(small, tmp_path):
    base = warmed_up(replace(small, lr_rule="linear"), 10)
    study = scaled(target_study(base, (64, 512), 128, (20.0, 60.0, 99.9)), 0.005)
    ended = run(study, tmp_path, rows=["100 epochs", "200 epochs"])
    assert len(ended) == 8
    _, *tables = write_report(tmp_path)[1]
    (table,) = [each for each in tables if each.title == "Updates to a target accuracy"]
    assert table.headers == ("", "batch", "20 %", "60 %", "99.9 %")
    assert [line[:2] for line in table.lines] == [
        *(("plain norm", "64"), ("plain norm", "512"), ("ghosts", "64"), ("ghosts", "512"))
    ]
    assert {line[-1] for line in table.lines} == {"not reached"}
    assert read_study(tmp_path).targets == (20.0, 60.0, 99.9)
    assert read_study(tmp_path).evaluations == 100


def test_targets_are_compared_at_six_batches_with_one_rule_for_the_rate():
    study = find_study("targets")
    assert study.targets == (88.0, 90.0, 91.0)
    assert list(study.rows) == ["50 epochs", "100 epochs", "200 epochs"]
    for factor, row in zip((0.25, 0.5, 1), study.rows.values(), strict=True):
        assert {(r.batch, r.ghost) for r in row.columns.values()} == {
            (size, ghost) for size in (128, 256, 512, 1024, 2048, 4096) for ghost in (None, 128)
        }
        for recipe in row.columns.values():
            assert isinstance(recipe, Recipe)
            assert recipe.plan(50_000).regime.lr == pytest.approx(0.1 * recipe.batch / 128)
            assert (recipe.regime.epochs, recipe.regime.warmup) == (200 * factor, 10 * factor)
