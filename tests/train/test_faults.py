"""No memory outside an update, and labels that are no class: one line each."""

import re
from dataclasses import replace

import pytest
import torch
from hungry import NO_MEMORY, hungry
from torch import nn

from ghostbatch import Regime, train
from ghostbatch.data import DATASETS, load
from ghostbatch.data.datasets import Split
from ghostbatch.errors import InputError, RankLocalError
from ghostbatch.nn import MODELS
from ghostbatch.train import loop
from ghostbatch.train.estimate import estimate

# --------------------------------------------------------------------------------------- memory


def test_an_evaluation_that_does_not_fit_names_a_micro_batch_that_does(tiny, tmp_path, monkeypatch):
    monkeypatch.setitem(MODELS, "hungry", hungry(1000, evaluating=True))
    recipe = replace(tiny, model="hungry", precision="fp64")
    whole = train(recipe, out=tmp_path / "whole")
    monkeypatch.setitem(MODELS, "hungry", hungry(40, evaluating=True))
    options, refusals = {}, []
    while True:
        try:
            summary = train(recipe, out=tmp_path / "run", **options)
            break
        except RankLocalError as error:
            refusals.append(str(error))
            options["micro"] = int(re.search(r"use micro (\d+)", str(error))[1])
    does_not_fit = "micro: an evaluation of {} samples at a time does not fit into the memory; "
    follows = "use micro {}: an evaluation takes as many at a time"
    assert refusals == [
        does_not_fit.format(1000) + follows.format(64),
        does_not_fit.format(64) + follows.format(32),
    ]
    assert summary.loss == pytest.approx(whole.loss, rel=1e-9)
    assert summary.accuracy == whole.accuracy


def test_an_evaluation_in_parts_is_that_of_the_whole_set_bit_for_bit_where_rounding_allows(
    tiny, monkeypatch
):
    """A network whose outputs do not depend on the number of samples gives the same sums."""

    class Table(nn.Module):
        def __init__(self, classes):
            super().__init__()
            self.weight = nn.Parameter(torch.arange(classes * 1.0))

        def forward(self, x):
            return x.flatten(1)[:, 300:301] * self.weight

    monkeypatch.setitem(MODELS, "table", lambda num_classes, **_: Table(num_classes))
    table = replace(tiny, model="table", ghost=None, regime=Regime(lr=0.0, epochs=0.016))
    records = []
    for micro in (None, 64, 16, 1):
        train(table, micro=micro, on_record=records.append)
    losses = {record.loss for record in records if record.split == "validation"}
    assert len(losses) == 1


@pytest.mark.parametrize(
    ("what", "line"),
    [
        (
            (loop, "State"),
            "model: f1 does not fit into the memory of cpu; use a smaller network, or another",
        ),
        (
            (Split, "to"),
            "data: digits does not fit into the memory of cpu; use a device with more memory",
        ),
        (
            (loop, "load"),
            "data: digits does not fit into the memory of cpu; use a device with more memory",
        ),
        (
            (torch, "save"),
            "micro: 64 samples at a time do not fit into this device's memory; use micro 32",
        ),
    ],
    ids=["the model", "data on the device", "data", "a checkpoint"],
)
@pytest.mark.parametrize("error", [NO_MEMORY, MemoryError()], ids=["of torch", "of numpy"])
def test_no_memory_outside_an_update_is_one_line(tiny, tmp_path, monkeypatch, what, line, error):
    def fail(*_arguments, **_options):
        raise error

    monkeypatch.setattr(*what, fail)
    with pytest.raises(RankLocalError, match=f"^{line}"):
        train(replace(tiny, model="f1"), out=tmp_path / "run", device="cpu")


# --------------------------------------------------------------------------------------- labels


def outputs(count, *, sequence=False):
    def build(num_classes, *, in_channels, image_size):
        del num_classes
        layers = [nn.Flatten(), nn.Linear(in_channels * image_size**2, count)]
        return nn.Sequential(*layers, *([Pair()] if sequence else []))

    return build


class Pair(nn.Module):
    """Returns its input twice."""

    def forward(self, x):
        return x, x


@pytest.mark.parametrize(
    ("build", "what"),
    [
        (outputs(7), r"outputs of shape \(2, 7\) for two images"),
        (outputs(10, sequence=True), "a tuple"),
    ],
    ids=["too few outputs", "no tensor"],
)
def test_a_network_without_an_output_for_every_class_is_refused_before_anything_is_written(
    tiny, tmp_path, monkeypatch, build, what
):
    monkeypatch.setitem(MODELS, "mine", build)
    recipe = replace(tiny, model="mine", ghost=None)
    line = f"^model: mine returns {what}, but digits has 10 classes; let it return one score"
    with pytest.raises(InputError, match=line):
        train(recipe, out=tmp_path / "run")
    with pytest.raises(InputError, match=line):
        estimate(recipe.plan(4000), load("digits").info, torch.device("cpu"))
    assert not list(tmp_path.iterdir())


def test_a_network_that_fails_on_the_images_is_refused_before_anything_is_written(tiny, tmp_path):
    recipe = replace(tiny, model="torchvision:alexnet", data="synthetic:3x16x16", ghost=None)
    line = r"^model: torchvision:alexnet fails on images of 3 x 16 x 16 \(RuntimeError: .*\); use a"
    with pytest.raises(InputError, match=line):
        train(recipe, out=tmp_path / "run")
    assert not list(tmp_path.iterdir())


def test_more_outputs_than_classes_are_fine(tiny, monkeypatch):
    monkeypatch.setitem(MODELS, "mine", outputs(12))
    assert train(replace(tiny, model="mine", ghost=None)).status == "finished"


@pytest.mark.parametrize("label", [-1, 10])
def test_a_label_that_is_no_class_is_refused(tiny, monkeypatch, label):
    data = load("digits")
    labels = data.test.labels.clone()
    labels[5] = label
    wrong = replace(data, test=Split(data.test.images, labels))
    monkeypatch.setitem(DATASETS, "digits", lambda *_: wrong)
    with pytest.raises(
        InputError, match=rf"^data: digits in .* has a label {label}, but 10 classes; get the data"
    ):
        train(tiny)
