"""A run that is resumed with other data, another network or other code than it began with."""

import shutil
from dataclasses import replace

import numpy as np
import pytest
import small_networks
import torch
from half_done import half_done
from PIL import Image
from torch import nn

from ghostbatch import train
from ghostbatch.data import load
from ghostbatch.errors import InputError
from ghostbatch.train import folder as run_folder
from ghostbatch.train import loop, read_header
from ghostbatch.train.header import make_header

# ------------------------------------------------------------------------------------ image folders


def pooled(num_classes):
    """A network that takes moments on images of 224 x 224."""
    layers = nn.AvgPool2d(56), nn.Flatten(), nn.Linear(48, 8), nn.BatchNorm1d(8)
    return nn.Sequential(*layers, nn.Linear(8, num_classes))


QUICK = {"workers": 1, "evaluations": 1}


def draw_image(path, value):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((8, 8, 3), value, dtype=np.uint8)).save(path)


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    root = tmp_path_factory.mktemp("images")
    for part, count in (("train", 6), ("val", 2)):
        for name in ("ant", "bee"):
            for number in range(count):
                draw_image(root / part / name / f"{number}.png", 20 * number)
    return root


@pytest.fixture
def on_images(tiny, images, tmp_path, monkeypatch):
    """A recipe on a copy of the folder, and the folder."""
    monkeypatch.setattr(small_networks, "pooled", pooled, raising=False)
    root = shutil.copytree(images, tmp_path / "images")
    changes = {"model": "python:small_networks:pooled", "data": f"folder:{root}", "ghost": 2}
    regime = replace(tiny.regime, epochs=5, drops=())
    return replace(tiny, batch=8, base_batch=8, regime=regime, **changes), root


def add_images(root):
    for number in range(7, 9):
        draw_image(root / "train" / "bee" / f"{number}.png", 7)


def remove_an_image(root):
    (root / "train" / "ant" / "3.png").unlink()


def add_a_class(root):
    for part in ("train", "val"):
        draw_image(root / part / "cow" / "0.png", 7)


def rename_an_image(root):
    (root / "train" / "ant" / "3.png").rename(root / "train" / "ant" / "9.png")


def change_the_label(root):
    (root / "val" / "ant" / "1.png").rename(root / "val" / "bee" / "9.png")


def replace_an_image(root):
    Image.fromarray(np.full((9, 300, 3), 1, dtype=np.uint8)).save(root / "val" / "bee" / "1.png")


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (add_images, "2 training images more"),
        (remove_an_image, "1 training image fewer"),
        (add_a_class, "1 training image more, 1 test image more and 1 class more"),
        (rename_an_image, "other training images"),
        (change_the_label, "other test images"),
        (replace_an_image, "other test images"),
    ],
)
def test_a_run_on_a_folder_of_images_that_changed_is_refused_in_words(
    on_images, tmp_path, change, problem
):
    recipe, root = on_images
    half_done(recipe, tmp_path / "run", **QUICK)
    before = {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    change(root)
    with pytest.raises(InputError) as refused:
        train(recipe, out=tmp_path / "run", **QUICK)
    assert str(refused.value) == (
        f"data: folder:{root} has {problem} than when this run began; "
        "restore the data, or choose another folder for a run with the new data"
    )
    assert {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()} == before


def test_images_with_another_date_are_the_same(on_images, tmp_path):
    recipe, root = on_images
    half_done(recipe, tmp_path / "run", **QUICK)
    for path in root.rglob("*.png"):
        path.touch()
    assert train(recipe, out=tmp_path / "run", **QUICK).status == "finished"


# --------------------------------------------------------------------------------- images in memory


@pytest.mark.parametrize(
    ("part", "field", "problem"),
    [
        ("train", "images", "other training images"),
        ("train", "labels", "other training images"),
        ("test", "labels", "other test images"),
    ],
)
def test_one_other_pixel_or_label_is_refused(tiny, tmp_path, monkeypatch, part, field, problem):
    half_done(tiny, tmp_path)
    data = load("digits")
    split = getattr(data, part)
    values = getattr(split, field).clone()
    values.view(-1)[77] += 1
    other = replace(data, **{part: replace(split, **{field: values})})
    monkeypatch.setattr(loop, "load", lambda *_, **__: other)
    with pytest.raises(InputError, match=f"^data: digits has {problem} than when this run began; "):
        train(tiny, out=tmp_path)


# ----------------------------------------------------------------------------------------- networks


def wider(num_classes):
    return nn.Sequential(
        *(nn.Flatten(), nn.Linear(784, 33), nn.BatchNorm1d(33), nn.ReLU()),
        *(nn.Linear(33, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, num_classes)),
    )


def shallower(num_classes):
    return nn.Sequential(*list(small_networks.narrow(num_classes))[:4], nn.Linear(32, num_classes))


def deeper(num_classes):
    return nn.Sequential(*small_networks.narrow(), nn.Linear(10, num_classes))


@pytest.mark.parametrize(
    ("other", "problem"),
    [
        (wider, r"now has 1.weight of shape \(33, 784\), not \(32, 784\)"),
        (shallower, "has no 5.weight any more"),
        (deeper, "has a new 8.weight"),
    ],
)
def test_a_network_that_changed_is_refused_by_its_first_difference(
    tiny, tmp_path, monkeypatch, other, problem
):
    monkeypatch.setattr(small_networks, "chosen", small_networks.narrow, raising=False)
    recipe = replace(tiny, model="python:small_networks:chosen")
    half_done(recipe, tmp_path)
    monkeypatch.setattr(small_networks, "chosen", other)
    with pytest.raises(InputError, match=f"^model: python:.*:chosen {problem}; restore it as"):
        train(recipe, out=tmp_path)


class Pair(nn.Module):
    """Two layers of the same shape, of which the first one in ``order`` is registered first."""

    def __init__(self, order):
        super().__init__()
        for name in order:
            self.add_module(name, nn.Linear(784, 10))

    def forward(self, x):
        return self.a(x.flatten(1)) + self.b(x.flatten(1))


def test_layers_in_another_order_are_refused(tiny, tmp_path, monkeypatch):
    """An optimizer's state goes by the order of the parameters, not by their names."""
    recipe = replace(tiny, model="python:small_networks:pair", ghost=None)
    monkeypatch.setattr(small_networks, "pair", lambda: Pair("ab"), raising=False)
    half_done(recipe, tmp_path)
    monkeypatch.setattr(small_networks, "pair", lambda: Pair("ba"))
    with pytest.raises(InputError, match=r"^model: .*:pair now has b.weight where it had a.weight"):
        train(recipe, out=tmp_path)


# --------------------------------------------------------------------------------------------- code


def test_another_torch_and_another_backend_are_told_in_one_line(tiny, tmp_path, monkeypatch):
    def make_older(*arguments, **how):
        header = make_header(*arguments, **how)
        return {**header, "backend": "triton", "versions": {"torch": "1.0"}}

    with monkeypatch.context() as before:
        before.setattr(run_folder, "make_header", make_older)
        half_done(tiny, tmp_path)
    monkeypatch.setenv("GHOSTBATCH_KERNELS", "0")
    with pytest.warns(UserWarning, match="this run began with") as warned:
        train(tiny, out=tmp_path)
    assert [str(warning.message) for warning in warned] == [
        "this run began with torch 1.0 and backend triton and continues with torch "
        f"{torch.__version__} and backend tensor, which rounds differently"
    ]


@pytest.mark.parametrize(("ghost", "name"), [(16, "tensor"), (None, "pytorch")])
def test_run_json_records_which_backend_computed(tiny, tmp_path, monkeypatch, ghost, name):
    monkeypatch.setenv("GHOSTBATCH_KERNELS", "0")
    train(replace(tiny, ghost=ghost), out=tmp_path)
    assert read_header(tmp_path)["backend"] == name
