"""What studies measure besides their runs."""

import json
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from ghostbatch.errors import InputError
from ghostbatch.files import locked
from ghostbatch.study import Study, find_study, instruments, measure, run_cells
from ghostbatch.study.instruments import hard_margin_in_the_plane


@pytest.mark.parametrize("seed", range(5))
def test_the_hard_margin_vector_is_that_of_a_support_vector_machine(seed):
    svm = pytest.importorskip("sklearn.svm")
    points = np.random.default_rng(seed).normal((3.0, 1.0), size=(30, 2))
    both = np.concatenate([points, -points])
    labels = np.repeat([1, -1], 30)
    machine = svm.SVC(kernel="linear", C=1e8, tol=1e-9).fit(both, labels)
    assert hard_margin_in_the_plane(points) == pytest.approx(machine.coef_[0], rel=1e-4)


def test_an_instrument_is_used_once_and_its_file_is_whole(tmp_path, monkeypatch):
    used = []
    monkeypatch.setitem(
        instruments.INSTRUMENTS, "walk", lambda *_: used.append(1) or {"found": [1.5]}
    )
    for _ in range(2):
        measure("walk", tmp_path, lambda *_: None)
    assert used == [1]
    assert json.loads((tmp_path / "walk.json").read_text()) == {"found": [1.5]}


def test_a_folder_in_use_is_refused(tmp_path):
    with locked(tmp_path), pytest.raises(InputError, match=r"^out: .* is in use"):
        measure("walk", tmp_path, lambda *_: None)
    assert not (tmp_path / "walk.json").exists()


def test_the_separable_study_approaches_the_hard_margin_vector(tmp_path):
    found = instruments.separable(tmp_path, lambda *_: None)
    gaps, logs = np.array(found["gaps"]), np.log(found["times"])
    assert found["over_log"][-1] == pytest.approx(found["vector"], abs=0.12)
    assert (gaps > 0).all()
    assert gaps[-1] * logs[-1] == pytest.approx(gaps[60] * logs[60], rel=0.2)


def test_the_potential_reaches_as_far_as_the_runs_walked_and_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(instruments, "DIRECTIONS", 4)
    monkeypatch.setattr(instruments, "IMAGES", 50)
    (tmp_path / "run").mkdir()
    summary = {"status": "finished", "accuracy": 1.0, "loss": 1.0, "updates": 1, "epochs": 1.0}
    (tmp_path / "run" / "summary.json").write_text(
        json.dumps({**summary, "distance": 12.5, "seconds": 1.0})
    )

    def stop(done, _):
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        instruments.potential(tmp_path, stop)
    counted = []
    found = instruments.potential(tmp_path, lambda done, _: counted.append(done))
    assert counted == [3, 4]
    assert found["radius"] == found["walked"] == 12.5
    assert max(found["distances"]) <= 12.5
    assert found["origin"] == pytest.approx(np.log(10), rel=0.1)  # ten classes, nothing learnt


def test_the_diffusion_study_changes_one_thing_a_row():
    rows = find_study("diffusion").rows
    for size, recipe in rows["before"].items():
        after = rows["after"][size]
        assert replace(after, lr_rule="none", ghost=None) == recipe
        assert (after.lr_rule, after.ghost) == ("sqrt", 32)
    for size, recipe in rows["no weight decay"].items():
        assert recipe.regime.weight_decay == 0
        assert replace(recipe, regime=rows["before"][size].regime) == rows["before"][size]
    rate, noise = rows["rate or noise"].values()
    assert replace(noise, noise=False, lr_rule="sqrt") == rate


def test_longer_runs_have_longer_first_phases_and_the_same_tail():
    plans = [recipe.plan(4000) for recipe in find_study("diffusion").rows["longer"].values()]
    firsts = [plan.drop_updates[0] for plan in plans]
    assert firsts == [63, 125, 250, 500, 1000]
    for plan in plans:
        drops = (*plan.drop_updates, plan.updates)
        tail = [b - a for a, b in pairwise(drops)]
        assert tail == pytest.approx([125, 125], abs=1)


def test_a_run_that_follows_another_is_started_when_that_one_has_ended(tiny, tmp_path):
    base = replace(tiny, batch=32, lr_rule="none", ghost=None)
    follower = replace(tiny, hold="distance", reference="SB")
    study = Study("small", {"row": {"far": follower, "SB": base}}, seeds=(0,))
    cells = study.cells(out=tmp_path)
    assert [cell.column for cell in cells] == ["SB", "far"]
    ended = []
    run_cells(
        cells,
        tmp_path,
        jobs=2,
        device="cpu",
        on_news=lambda cell, news: ended.append(cell.column) if hasattr(news, "status") else None,
    )
    assert ended == ["SB", "far"]
    header = json.loads((tmp_path / "row" / "far" / "seed-0" / "run.json").read_text())
    assert header["recipe"]["reference"] == str(tmp_path / "row" / "SB" / "seed-0")


def test_the_column_that_another_one_follows_is_run_with_it(tmp_path):
    cells = find_study("diffusion").cells(["by distance"], [0], tmp_path)
    assert [(cell.row, cell.column) for cell in cells] == [
        ("by distance", "SB"),
        ("by distance", "by distance"),
    ]


def test_a_run_whose_reference_diverged_is_left_out_and_the_study_goes_on(tiny, tmp_path):
    hot = replace(tiny.regime, lr=1e25)
    base = replace(tiny, batch=32, lr_rule="none", ghost=None, clip=None, regime=hot)
    follower = replace(tiny, hold="distance", reference="SB", regime=hot, clip=None)
    study = Study("small", {"row": {"SB": base, "far": follower}}, seeds=(0,))
    with pytest.warns(UserWarning, match="row far seed 0 is left out: the run that it follows"):
        run_cells(
            study.cells(out=tmp_path), tmp_path, jobs=1, device="cpu", on_news=lambda *_: None
        )
    assert not (tmp_path / "row" / "far").exists()


def test_the_potential_is_measured_again_when_a_run_has_walked_farther(tmp_path, monkeypatch):
    used = []

    def instrument(out, _):
        used.append(1)
        return {"walked": instruments._walked(out)}

    monkeypatch.setitem(instruments.INSTRUMENTS, "potential", instrument)
    measure("potential", tmp_path, lambda *_: None)
    measure("potential", tmp_path, lambda *_: None)
    assert len(used) == 1
    summary = {"status": "finished", "accuracy": 1.0, "loss": 1.0, "updates": 1, "epochs": 1.0}
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "summary.json").write_text(
        json.dumps({**summary, "distance": 12.5, "seconds": 1.0})
    )
    measure("potential", tmp_path, lambda *_: None)
    assert len(used) == 2
