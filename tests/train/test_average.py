"""`Recipe(ema=...)`: averaged beside the run, evaluated at its end, and exact when resumed."""

import json
from dataclasses import replace

import pytest
import torch
from before_update import before_update
from half_done import half_done
from torch.optim.swa_utils import AveragedModel

from ghostbatch import InputError, Recipe, load_run, train
from ghostbatch.train.load import evaluate_run, read_run

CPU = torch.device("cpu")


def saved_average(folder):
    """Return the averaged weights in a checkpoint."""
    average = torch.load(folder / "checkpoint.pt", weights_only=True)["state"]["average"]
    return {name: weighted / average["total"] for name, weighted in average["sums"].items()}


def by_pytorch(recipe):
    """Return the weights after each update, averaged by PyTorch; the decay is squared."""
    update, decay = before_update(recipe), recipe.ema**2
    state = update.state
    averaged = AveragedModel(
        state.model, avg_fn=lambda a, w, n: a + (w - a) * (1 - decay) / (1 - decay ** (int(n) + 1))
    )
    while state.update < state.end:
        update()
        averaged.update_parameters(state.model)
    return dict(averaged.module.named_parameters())


def test_a_run_averages_its_weights_over_as_many_images_as_the_base_batch(tiny, tmp_path):
    recipe = replace(tiny, ema=0.9)  # the batch is twice base_batch
    summary = train(recipe, out=tmp_path, device="cpu")
    averaged = saved_average(tmp_path)
    torch.testing.assert_close(averaged, by_pytorch(recipe), rtol=1e-4, atol=1e-6)
    run = read_run(tmp_path, averaged=True)
    for name, weight in run.model.named_parameters():
        assert torch.equal(weight, averaged[name])
    found = evaluate_run(run, CPU, recalibrated=True)
    assert summary.ema_accuracy == pytest.approx(found.accuracy, abs=0.11)  # one image
    assert json.loads((tmp_path / "summary.json").read_text())["ema_accuracy"] > 0


def test_an_average_changes_no_other_number_of_a_run(tiny, tmp_path, outcome):
    for name, ema in (("with", 0.99), ("without", None)):
        train(replace(tiny, ema=ema), out=tmp_path / name, device="cpu")
    ours, theirs = (outcome(tmp_path / name) for name in ("with", "without"))
    assert ours["summary"].pop("ema_accuracy") > 0
    assert ours == theirs


def test_a_run_with_everything_beyond_the_paper_that_was_interrupted_ends_bit_identical(
    tiny, tmp_path, outcome
):
    regime = replace(tiny.regime, drops=(), schedule="polynomial", power=2, warmup=0.05)
    extra = {"hold": "rate", "decay_norms": False, "label_smoothing": 0.1, "ema": 0.9}
    recipe = replace(tiny, regime=regime, **extra)
    train(recipe, out=tmp_path / "whole", device="cpu")
    half_done(recipe, tmp_path / "cut", device="cpu")
    train(recipe, out=tmp_path / "cut", device="cpu")
    assert outcome(tmp_path / "cut") == outcome(tmp_path / "whole")
    mine, right = saved_average(tmp_path / "cut"), saved_average(tmp_path / "whole")
    assert all(mine[name].equal(right[name]) for name in right)
    written = json.loads((tmp_path / "cut" / "run.json").read_text())["recipe"]
    assert Recipe.from_dict(written) == recipe
    assert recipe.differences(tiny.as_dict()) == [
        *("regime", "decay_norms", "label_smoothing", "hold", "ema")
    ]


def test_a_network_without_norms_is_evaluated_as_it_is(tiny):
    recipe = replace(tiny, model="python:small_networks:without_norms", ghost=None, ema=0.5)
    summary = train(recipe, device="cpu", evaluations=1)
    assert summary.recalibrated_accuracy is None
    assert summary.ema_accuracy > 0


@pytest.mark.parametrize("ema", [0.0, 1.0, 1.5])
def test_a_decay_outside_zero_and_one_is_refused(tiny, ema):
    with pytest.raises(InputError, match=f"^ema: {ema} is not between 0 and 1; use 0.999"):
        replace(tiny, ema=ema)


def test_averaged_weights_of_a_run_without_them_are_refused(tiny, tmp_path):
    train(tiny, out=tmp_path, device="cpu")
    with pytest.raises(InputError, match=r"^averaged: .* kept no average of its weights; leave it"):
        load_run(tmp_path, averaged=True)
