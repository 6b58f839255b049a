"""A run whose batch grows: a loop that accumulates gradients, and the larger batch at once."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from before_update import before_update
from ghost_loop import looped
from half_done import half_done
from small_networks import narrow

from ghostbatch import Regime, train
from ghostbatch.data import PermutationStream, load
from ghostbatch.draws import key

REGIME = Regime(lr=0.08, epochs=0.4, drops=((0.1, 0.04, 0.0), (0.2, 0.008)), warmup=0.05)
SCHEDULE = [(1, 0.08, 1e-4)] * 6 + [(2, 0.08, 0.0)] * 4 + [(4, 0.032, 0.0)] * 3
"""Batches, rate and weight decay of each update of the recipe below.

Phases end near batches 6.25, 12.5 and 25, half up: at 6, 6 + 4 * 2 and 14 + 3 * 4.
"""


@pytest.fixture
def growing(tiny):
    """Return a run in which the batch grows from 64 to 128 and 256; the rate falls once."""
    return replace(tiny, regime=REGIME, lr_rule="none", grow=300, precision="fp64", clip=1.0)


def plain_loop(recipe):
    """Train with PyTorch's own pieces: one backward for each batch, one step for several."""
    data = load(recipe.data)
    torch.manual_seed(key(recipe.seed, "weights"))
    model = looped(narrow(), recipe.ghost or recipe.batch).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    stream, batch, losses = PermutationStream(4000, recipe.batch, recipe.seed), 0, []
    for update, (size, lr, decay) in enumerate(SCHEDULE):
        optimizer.param_groups[0].update(lr=lr * (update / 3.125 if update < 3 else 1))
        optimizer.param_groups[0].update(weight_decay=decay)
        optimizer.zero_grad()
        total = 0.0
        for _ in range(size):
            index = stream.indices(batch)
            x = (data.train.images[index].double() - data.mean) / data.deviation
            loss = F.cross_entropy(model(x), data.train.labels[index])
            (loss / size).backward()
            batch, total = batch + 1, total + float(loss.detach()) / size
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
        optimizer.step()
        losses.append(total)
    return model, losses


@pytest.mark.parametrize(("ghost", "micro"), [(16, None), (16, 32), (None, None)])
def test_a_run_is_the_loop_that_accumulates_gradients(growing, tmp_path, ghost, micro):
    records = []
    recipe = replace(growing, ghost=ghost)
    train(recipe, out=tmp_path, device="cpu", micro=micro, on_record=records.append)
    model, losses = plain_loop(recipe)
    saved = torch.load(tmp_path / "checkpoint.pt", weights_only=True)["state"]["model"]
    expected = {name.replace(".norm.", "."): each for name, each in model.state_dict().items()}
    torch.testing.assert_close(saved, expected, rtol=1e-9, atol=1e-9)
    found = {r.update: r for r in records if r.split == "train"}
    assert [found[n].loss for n in range(1, 11)] == pytest.approx(losses[:10], rel=1e-9)
    batches = {6: 6, 7: 8, 10: 14, 11: 18, 13: 26}
    assert {n: found[n].epoch for n in batches} == {n: 64 * batches[n] / 4000 for n in batches}


def one_update(recipe, done):
    """Return the state after one update of a run that had done so many, all with first weights."""
    update = before_update(recipe)
    update.state.update = done
    update()
    return update.state


RANDOM = {"model": "python:small_networks:dropping", "label_noise": 0.3, "dropconnect": 0.2}
"""What is drawn for each update, and with positions in its batch."""


@pytest.mark.parametrize(("small", "changes"), [(8, {}), (0, RANDOM)])
def test_with_ghosts_a_grown_update_is_that_of_the_larger_batch(growing, small, changes):
    """Eight updates of 64 have the samples of two updates of 256; without any, draws are equal."""
    regime = replace(REGIME, warmup=0, drops=((small * 0.016 or 0.001, 0.02),))
    recipe = replace(growing, regime=regime, **changes)
    at_once = replace(recipe, batch=256, grow=None, regime=replace(regime, drops=()))
    grown, large = one_update(recipe, done=small), one_update(at_once, done=small // 4)
    assert grown.plan.stream(small) == range(small, small + 4)
    states = (state.model.state_dict() for state in (grown, large))
    torch.testing.assert_close(*states, rtol=1e-9, atol=1e-9)
    means = [state.monitor.means() for state in (grown, large)]
    assert means[0] == pytest.approx(means[1], rel=1e-9)


@pytest.mark.parametrize("stop", [5, 6, 7, 9])
def test_a_run_interrupted_around_a_growth_ends_bit_identical(growing, tmp_path, outcome, stop):
    recipe = replace(growing, model="python:small_networks:dropping", augment=True, dropconnect=0.1)
    train(recipe, out=tmp_path / "whole")
    half_done(recipe, tmp_path / "cut", stop)
    train(recipe, out=tmp_path / "cut")
    assert outcome(tmp_path / "cut") == outcome(tmp_path / "whole")


def test_image_folders_grow_and_continue_too(folder_recipe, tmp_path, outcome):
    regime = Regime(lr=0.02, epochs=3, drops=((1, 0.01),))
    recipe = replace(folder_recipe, regime=regime, grow=16, augment=True)
    train(recipe, out=tmp_path / "whole", workers=1)
    half_done(recipe, tmp_path / "cut", 4)
    summary = train(recipe, out=tmp_path / "cut")
    assert (summary.updates, summary.epochs) == (6, 3)
    assert outcome(tmp_path / "cut") == outcome(tmp_path / "whole")


def test_a_run_that_diverges_in_a_grown_update_names_its_layer(growing):
    regime = replace(REGIME, lr=1e25, drops=((0.016, 5e24),), warmup=0)
    summary = train(replace(growing, regime=regime, clip=None, precision="fp32"))
    assert summary.status == "diverged"
    assert summary.reason.startswith("update 2: the loss is nan, first in the output of layer 4")
