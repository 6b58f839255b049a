"""Runs that are evaluated on held-out training images: the test set has no part in them."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from ghostbatch import load_run, train
from ghostbatch.data import load
from ghostbatch.data.decode import Files
from ghostbatch.errors import InputError
from ghostbatch.train import loop
from ghostbatch.train.load import evaluate_run, read_run


def header(folder):
    return json.loads((folder / "run.json").read_text())


def test_the_accuracy_is_that_on_the_held_out_images_without_augmentation(tiny, tmp_path):
    summary = train(replace(tiny, holdout=1000, augment=True), out=tmp_path, device="cpu")
    data = load("digits").hold_out(1000)
    images = ((data.test.images - data.mean) / data.deviation).float()
    with torch.no_grad():
        outputs = load_run(tmp_path)(images)
    correct = (outputs.argmax(1) == data.test.labels).double().mean().item()
    assert summary.accuracy == pytest.approx(100 * correct)
    assert summary.loss == pytest.approx(F.cross_entropy(outputs, data.test.labels).item())
    found = evaluate_run(read_run(tmp_path), torch.device("cpu"))
    assert (found.loss, found.accuracy) == (summary.loss, summary.accuracy)


def test_epochs_are_those_of_the_remaining_images_and_the_files_say_so(tiny, tmp_path):
    summary = train(replace(tiny, holdout=1000), out=tmp_path)
    assert summary.updates == 12  # 0.256 * 3000 / 64
    assert summary.held_out is True
    assert json.loads((tmp_path / "summary.json").read_text())["held_out"] is True
    written = header(tmp_path)
    assert (written["samples"], written["recipe"]["holdout"]) == (3000, 1000)
    sizes = {"samples": 3000, "test_samples": 1000, "held_out": True}
    assert {name: written["data"][name] for name in sizes} == sizes
    assert read_run(tmp_path).info == load("digits", holdout=1000).info
    assert train(tiny).held_out is False


def test_every_seed_has_the_same_split(tiny, tmp_path):
    for seed in (0, 1):
        train(replace(tiny, holdout=1000, seed=seed), out=tmp_path / str(seed), evaluations=1)
    assert header(tmp_path / "0")["data"] == header(tmp_path / "1")["data"]


def test_no_number_depends_on_the_test_set(tiny, tmp_path, outcome, monkeypatch):
    recipe = replace(tiny, holdout=1000)
    train(recipe, out=tmp_path / "a")
    data = load("digits")
    black = replace(data.test, images=torch.zeros_like(data.test.images))
    other = replace(data, test=black).hold_out(1000)
    monkeypatch.setattr(loop, "load", lambda *_, **__: other)
    train(recipe, out=tmp_path / "b")
    assert outcome(tmp_path / "a") == outcome(tmp_path / "b")


def test_the_test_images_of_a_folder_are_never_decoded(folder_recipe, tmp_path):
    root = Path(folder_recipe.data.removeprefix("folder:"))
    for path in (root / "val").rglob("*.png"):
        path.write_bytes(b"not an image")
    recipe = replace(folder_recipe, holdout=6, augment=True)
    summary = train(recipe, out=tmp_path / "run", workers=1)
    assert (summary.status, summary.held_out) == ("finished", True)
    assert summary.updates == 3  # 4 / 3 of 18 images in batches of 8
    assert (summary.accuracy * 6 / 100) % 1 == pytest.approx(0, abs=1e-9)
    assert isinstance(load(recipe.data, holdout=6).test, Files)


def test_a_run_is_not_continued_with_another_split(tiny, tmp_path):
    train(replace(tiny, holdout=1000), out=tmp_path, evaluations=1)
    with pytest.raises(InputError, match=r"^out: .* belongs to another recipe \(other holdout\)"):
        train(replace(tiny, holdout=500), out=tmp_path)


def test_a_batch_above_the_remaining_images_is_refused_before_anything_is_written(tiny, tmp_path):
    recipe = replace(tiny, holdout=3950)
    with pytest.raises(InputError, match=r"^batch: 64 is above the 50 training samples of digits"):
        train(recipe, out=tmp_path / "run")
    with pytest.raises(InputError, match=r"^holdout: 4,000 of 4,000 training images cannot be"):
        train(replace(recipe, holdout=4000), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
