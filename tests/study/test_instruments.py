"""What studies measure besides their runs."""

import json
from dataclasses import replace

import numpy as np
import pytest

from ghostbatch.errors import InputError
from ghostbatch.files import locked
from ghostbatch.study import Instrument, Where, find_recipe, instruments, measure
from ghostbatch.study.instruments import hard_margin_in_the_plane, largest_distance

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


@pytest.mark.parametrize("seed", range(5))
def test_the_hard_margin_vector_is_that_of_a_support_vector_machine(seed):
    svm = pytest.importorskip("sklearn.svm")
    points = np.random.default_rng(seed).normal((3.0, 1.0), size=(30, 2))
    both = np.concatenate([points, -points])
    labels = np.repeat([1, -1], 30)
    machine = svm.SVC(kernel="linear", C=1e8, tol=1e-9).fit(both, labels)
    assert hard_margin_in_the_plane(points) == pytest.approx(machine.coef_[0], rel=1e-4)


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


def test_the_separable_study_approaches_the_hard_margin_vector(tmp_path):
    found = instruments.separable(None, tmp_path, CPU, ignore)
    gaps, logs = np.array(found["gaps"]), np.log(found["times"])
    assert found["over_log"][-1] == pytest.approx(found["vector"], abs=0.12)
    assert (gaps > 0).all()
    assert gaps[-1] * logs[-1] == pytest.approx(gaps[60] * logs[60], rel=0.2)


@pytest.fixture
def _small_scan(monkeypatch):
    monkeypatch.setattr(instruments, "DIRECTIONS", 4)
    monkeypatch.setattr(instruments, "IMAGES", 50)


@pytest.mark.usefixtures("_small_scan")
def test_the_potential_reaches_as_far_as_the_runs_and_continues_after_an_interrupt(tmp_path):
    finish_a_run(tmp_path / "run", distance=12.5)
    recipe = find_recipe("f1-digits")

    def stop(done, _):
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        instruments.potential(recipe, tmp_path, CPU, stop)
    counted = []
    found = instruments.potential(recipe, tmp_path, CPU, lambda done, _: counted.append(done))
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
    found = []
    for init in ("network", "glorot"):
        recipe = replace(plain, init=init)
        (tmp_path / init).mkdir()
        found.append(instruments.potential(recipe, tmp_path / init, CPU, ignore))
        assert found[-1]["init"] == init
    assert found[0]["origin"] != found[1]["origin"]


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
