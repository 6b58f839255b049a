"""What studies measure besides their runs."""

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from ghostbatch import load_run, train
from ghostbatch.data import load
from ghostbatch.diagnostics import largest_eigenvalue
from ghostbatch.draws import generator
from ghostbatch.errors import InputError
from ghostbatch.files import locked
from ghostbatch.study import Instrument, Where, find_recipe, instruments, measure
from ghostbatch.study.instruments import largest_distance
from ghostbatch.train.load import read_run

WALK = Instrument("walk")
CPU = Where(device="cpu")


def ignore(*_):
    pass


def finish_a_run(folder, distance):
    """Write the summary of a run that ended at a distance."""
    folder.mkdir()
    summary = {"status": "finished", "accuracy": 1.0, "loss": 1.0, "updates": 1, "epochs": 1.0}
    summary |= {"distance": distance, "seconds": 1.0}
    (folder / "summary.json").write_text(json.dumps(summary))


def test_an_instrument_measures_once_and_its_file_is_complete(tmp_path, monkeypatch):
    used = []
    monkeypatch.setitem(
        instruments.MEASUREMENTS, "walk", lambda *_: used.append(1) or {"found": [1.5]}
    )
    for _ in range(2):
        measure(WALK, tmp_path, CPU, ignore)
    assert used == [1]
    assert json.loads((tmp_path / "walk.json").read_text()) == {"found": [1.5]}


def test_a_folder_in_use_is_refused(tmp_path):
    with locked(tmp_path), pytest.raises(InputError, match=r"^out: .* is in use"):
        measure(WALK, tmp_path, CPU, ignore)
    assert not (tmp_path / "walk.json").exists()


def test_every_draw_of_the_separable_study_nears_its_limit_or_has_a_near_support_vector(
    monkeypatch,
):
    monkeypatch.setattr(instruments, "DRAWS", 3)
    draws = instruments.separable(Instrument("separable"), Path(), CPU, ignore)["draws"]
    assert len(draws) == 3
    for draw in draws:
        end, gap = draw["times"][-1], draw["gaps"][-1]
        assert end > 1e149
        scaled = gap * draw["distances"][-1] / draw["length"]
        near = end ** -draw["slack"] > 1e-3
        assert near or scaled == pytest.approx(draw["limit"], abs=1e-3)
    assert [end ** -draw["slack"] > 1e-3 for draw in draws] == [True, False, False]


@pytest.fixture
def _small_scan(monkeypatch):
    monkeypatch.setattr(instruments, "DIRECTIONS", 4)
    monkeypatch.setattr(sys.modules["ghostbatch.train.measure"], "IMAGES", 50)


@pytest.mark.usefixtures("_small_scan")
def test_the_potential_reaches_as_far_as_the_runs_and_continues_after_an_interrupt(tmp_path):
    finish_a_run(tmp_path / "run", distance=12.5)
    chosen = Instrument("potential", find_recipe("f1-digits"))

    def stop(done, _):
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        instruments.potential(chosen, tmp_path, CPU, stop)
    counted = []
    found = instruments.potential(chosen, tmp_path, CPU, lambda done, _: counted.append(done))
    assert counted == [3, 4]
    assert found["radius"] == found["walked"] == 12.5
    assert max(found["distances"]) <= 12.5
    assert found["origin"] == pytest.approx(np.log(10), rel=0.1)  # ten classes, nothing learnt


@pytest.mark.usefixtures("_small_scan")
def test_the_potential_is_of_the_recipe_that_the_study_declares(tmp_path, tiny):
    other = replace(tiny, data="synthetic:1x8x8x3:60", batch=16, ghost=None)
    measure(Instrument("potential", other), tmp_path, CPU, ignore)
    found = json.loads((tmp_path / "potential.json").read_text())
    assert (found["model"], found["data"]) == (tiny.model, "synthetic:1x8x8x3:60")
    assert found["origin"] == pytest.approx(np.log(3), rel=0.3)  # three classes


@pytest.mark.usefixtures("_small_scan")
def test_the_potential_is_around_the_weights_that_the_recipe_starts_from(tmp_path, tiny):
    plain = replace(tiny, data="synthetic:1x8x8x3:60", batch=16, ghost=None)
    target = tmp_path / "potential.json"

    def origin(init):
        measure(Instrument("potential", replace(plain, init=init)), tmp_path, CPU, ignore)
        return json.loads(target.read_text())["origin"]

    own, glorot = origin("network"), origin("glorot")
    assert own != glorot
    assert origin("network") == own
    target.write_text(json.dumps({**json.loads(target.read_text()), "origin": 1.0}))
    assert origin("network") == 1.0, "what was measured at these weights is kept"
    assert origin("glorot") == glorot


def test_a_potential_without_a_recipe_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"^recipe: the potential needs one; give Instrument a"):
        measure(Instrument("potential"), tmp_path, CPU, ignore)


@pytest.mark.usefixtures("_small_scan")
def test_the_potential_is_measured_again_when_a_run_went_farther_or_the_recipe_changed(tmp_path):
    recipe = find_recipe("f1-digits")

    def samples(recipe):
        """Return how many samples are measured; none if the file still holds."""
        counted = []
        measure(Instrument("potential", recipe), tmp_path, CPU, lambda *_: counted.append(1))
        return len(counted)

    assert [samples(recipe), samples(recipe)] == [4, 0]
    finish_a_run(tmp_path / "run", distance=12.5)
    assert [samples(recipe), samples(recipe)] == [4, 0]
    other = replace(recipe, data="synthetic:1x28x28x10:60")
    assert [samples(other), samples(other), samples(recipe)] == [4, 0, 0]


@pytest.mark.parametrize("text", ["{", "[]"])
def test_a_damaged_file_is_refused_by_name(tmp_path, text):
    (tmp_path / "walk.json").write_text(text)
    with pytest.raises(
        InputError, match=r"^folder: .*walk.json cannot be read; delete it, and run"
    ):
        measure(WALK, tmp_path, CPU, ignore)


def test_an_unknown_instrument_is_refused():
    with pytest.raises(InputError, match=r"^instrument: 'wlak' is unknown; did you mean walk\?"):
        Instrument("wlak")


def test_the_largest_distance_is_that_of_the_summaries_that_can_be_read(tmp_path):
    for name, distance in (("near", 2.0), ("far", 5.0), ("damaged", 9.0)):
        finish_a_run(tmp_path / name, distance)
    (tmp_path / "damaged" / "summary.json").write_bytes(b"\xff")
    assert largest_distance(tmp_path) == 5.0


@pytest.fixture
def two_ends(tmp_path, tiny, _small_scan):
    """Return the folder of a study with two finished runs, one only begun, and one diverged."""
    for column, recipe in (("LB", tiny), ("SB", replace(tiny, batch=32, ghost=None))):
        train(recipe, out=tmp_path / "row" / column / "seed-0", device="cpu")
    begun = tmp_path / "row" / "SB" / "seed-1"
    shutil.copytree(tmp_path / "row" / "SB" / "seed-0", begun)
    (begun / "summary.json").unlink()
    finish_a_run(diverged := tmp_path / "row" / "SB" / "seed-2", distance=1.0)
    text = (diverged / "summary.json").read_text()
    (diverged / "summary.json").write_text(text.replace("finished", "diverged"))
    return tmp_path


def test_sharpness_is_that_of_each_finished_runs_end_on_the_same_images(two_ends):
    measure(Instrument("sharpness"), two_ends, CPU, ignore)
    found = json.loads((two_ends / "sharpness.json").read_text())["runs"]
    assert set(found) == {"row/LB/seed-0", "row/SB/seed-0"}
    data = load("digits")
    images = torch.randperm(4000, generator=generator(0, "potential"))[:50]
    inputs = (data.train.images[images] - data.mean.view(1, 1, 1, 1)) / data.deviation
    for place, run in found.items():
        model = load_run(two_ends / place)

        def loss(m):
            return F.cross_entropy(m(inputs.float()), data.train.labels[images])

        for measured, relative in (("eigenvalue", False), ("relative", True)):
            expected = largest_eigenvalue(model, loss, relative=relative).value
            assert run[measured]["value"] == pytest.approx(expected, rel=1e-4)
        assert (run["images"], run["rate"]) == (50, read_run(two_ends / place).plan.regime.lr)
    assert found["row/LB/seed-0"]["rate"] == pytest.approx(0.05 * 2**0.5)


def test_sharpness_is_measured_once_for_each_end(two_ends, monkeypatch):
    measured = []

    def count(folder, _):
        measured.append(folder.relative_to(two_ends).as_posix())
        if measured[-1] == interrupted:
            raise KeyboardInterrupt
        return {"eigenvalue": {"value": 1.0}}

    def again():
        measured.clear()
        measure(Instrument("sharpness"), two_ends, CPU, ignore)
        return measured

    monkeypatch.setattr(instruments, "_sharpness_of", count)
    interrupted = "row/SB/seed-0"
    with pytest.raises(KeyboardInterrupt):
        again()
    interrupted = None
    assert again() == ["row/SB/seed-0"]
    assert again() == []
    summary = two_ends / "row" / "SB" / "seed-0" / "summary.json"
    shutil.copy(two_ends / "row" / "LB" / "seed-0" / "summary.json", summary)
    assert again() == ["row/SB/seed-0"], "its end has another loss"
    shutil.rmtree(summary.parent)
    assert again() == []
    assert list(json.loads((two_ends / "sharpness.json").read_text())["runs"]) == ["row/LB/seed-0"]


def test_a_sharpness_file_that_cannot_be_read_is_refused_by_name(two_ends):
    (two_ends / "sharpness.json").write_text("{}")
    with pytest.raises(InputError, match=r"^folder: .*sharpness.json cannot be read; delete it"):
        measure(Instrument("sharpness"), two_ends, CPU, ignore)
