"""The named recipes are those of the paper, and run."""

import math
import re
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
import torch.nn.functional as F

from ghostbatch import Regime, train
from ghostbatch.data import find_info, load
from ghostbatch.errors import InputError
from ghostbatch.nn import find_model, to_ghost
from ghostbatch.recipes import RECIPES, falling, find_recipe

PAPER = {  # SB, LB, +LR, +GBN, +RA
    "f1-mnist": "98.27 97.05 97.55 97.60 98.53",
    "c1-cifar10": "87.80 83.95 86.15 86.4 88.20",
    "resnet44-cifar10": "92.83 86.10 89.30 90.50 93.07",
    "vgg-cifar10": "92.30 84.1 88.6 91.50 93.03",
    "c3-cifar100": "61.25 51.50 57.38 57.5 63.20",
    "wresnet16-4-cifar100": "73.70 68.15 69.05 71.20 73.57",
    "alexnet-imagenet": "57.10 41.23 53.25 54.92 59.5",
}
REGIMES = {
    "f1-mnist": (128, Regime(0.1, 50, ((10, 0.01), (20, 1e-3), (30, 1e-4)), 0.9, 1e-4)),
    "resnet44-cifar10": (128, Regime(0.1, 200, ((81, 0.01), (122, 1e-3), (164, 1e-4)), 0.9, 1e-4)),
    "wresnet16-4-cifar100": (
        256,
        Regime(0.1, 200, ((60, 0.02), (120, 4e-3), (160, 8e-4)), 0.9, 5e-4),
    ),
    "alexnet-imagenet": (
        128,
        Regime(0.01, 30, ((10, 5e-3), (15, 1e-3, 0.0), (20, 5e-4), (25, 1e-4)), 0.9, 5e-4),
    ),
}


def tiny(name, batch, samples, **changes):
    """Return the recipe on synthetic data of its shape, with its whole regime in one epoch."""
    recipe = find_recipe(name)
    info = find_info(recipe.data)
    shape = "x".join(map(str, (*info.shape, info.classes)))
    return replace(
        recipe,
        data=f"synthetic:{shape}:{samples}",
        batch=batch,
        base_batch=batch,
        regime=recipe.regime.stretched(Fraction(1, recipe.regime.epochs)),
        **changes,
    )


def test_there_is_a_recipe_for_every_row_of_the_paper():
    assert set(RECIPES) == {"f1-digits", *PAPER}


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_named_after_its_network_and_data(name):
    recipe = find_recipe(name)
    assert name == f"{recipe.model}-{recipe.data}"
    assert recipe.batch == recipe.base_batch
    assert recipe.clip == 5.0
    assert (recipe.ghost, recipe.lr_rule, recipe.hold) == (None, "none", "epochs")
    assert recipe.augment == (recipe.data in ("cifar10", "cifar100", "imagenet"))


@pytest.mark.parametrize("name", PAPER)
def test_a_docstring_gives_the_papers_figures_and_the_cost(name):
    text = " ".join(RECIPES[name].__doc__.split())
    found = re.search(r"The paper: SB (\S+), LB (\S+), \+LR (\S+), \+GBN (\S+), \+RA (\S+) %", text)
    assert " ".join(found.groups()) == PAPER[name]
    images = find_recipe(name).regime.epochs * find_info(find_recipe(name).data).samples
    assert f"Cost: {images / 1e6:.0f} million images." in text


@pytest.mark.parametrize("name", REGIMES)
def test_a_regime_is_the_papers_where_it_gives_one(name):
    recipe = find_recipe(name)
    assert (recipe.base_batch, recipe.regime) == REGIMES[name]


def test_weight_decay_of_alexnet_ends_at_epoch_15():
    regime = find_recipe("alexnet-imagenet").regime
    assert [regime.at(epoch).weight_decay for epoch in (0, 14, 15, 20, 29)] == [5e-4, 5e-4, 0, 0, 0]


CHOSEN = {"c1-cifar10": falling(0.01), "c3-cifar100": falling(0.02), "vgg-cifar10": falling(0.01)}


@pytest.mark.parametrize("name", CHOSEN)
def test_a_regime_that_the_paper_does_not_give_falls_to_a_fifth_three_times(name):
    recipe = find_recipe(name)
    assert recipe.regime == CHOSEN[name]
    assert (recipe.base_batch, recipe.regime.momentum) == (128, 0.9)
    assert (recipe.regime.epochs, recipe.regime.weight_decay) == (200, 5e-4)
    rates = [recipe.regime.at(epoch).lr for epoch in (0, 60, 120, 160)]
    assert rates == pytest.approx([rates[0] / 5**k for k in range(4)])


@pytest.mark.parametrize("ghost", [None, 4])
@pytest.mark.parametrize("name", [name for name in RECIPES if name != "alexnet-imagenet"])
def test_a_recipe_trains_three_updates_on_data_of_its_shape(name, ghost):
    summary = train(tiny(name, batch=8, samples=24, ghost=ghost), device="cpu", evaluations=1)
    assert (summary.status, summary.updates) == ("finished", 3)
    assert math.isfinite(summary.loss)
    assert summary.distance > 0


def test_alexnet_trains_on_data_of_its_shape():
    """Without a run folder: a checkpoint of it is nearly a gigabyte."""
    recipe = tiny("alexnet-imagenet", batch=4, samples=4)
    data = load(recipe.data)
    torch.manual_seed(0)
    model = to_ghost(find_model(recipe.model)(data.classes, in_channels=3, image_size=224), 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=recipe.regime.lr)
    images = (data.train.images.float() - data.mean.view(3, 1, 1)) / data.deviation.view(3, 1, 1)
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images.float()), data.train.labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(math.log(1000), rel=0.1)
    assert losses[1] < losses[0]


def test_train_takes_the_name_of_a_recipe(tiny, tmp_path, monkeypatch, outcome):
    monkeypatch.setitem(RECIPES, "tiny", lambda: tiny)
    train("tiny", out=tmp_path / "by name")
    train(tiny, out=tmp_path / "by recipe")
    assert outcome(tmp_path / "by name") == outcome(tmp_path / "by recipe")
    with pytest.raises(InputError, match="recipe: 'f1-digit' is unknown; did you mean f1-digits"):
        train("f1-digit")
