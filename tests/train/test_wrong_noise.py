"""Label noise and smoothing, dropconnect and Glorot initialisation, as a run uses them."""

from dataclasses import replace
from math import sqrt
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from before_update import before_update
from half_done import half_done
from torch import nn
from torch.func import functional_call

from ghostbatch import InputError, train
from ghostbatch.data import TensorFeed, load
from ghostbatch.draws import generator, key
from ghostbatch.nn import MODELS
from ghostbatch.nn.dropconnect import DropConnect, connections
from ghostbatch.nn.dropout import BatchPosition, keep_mask
from ghostbatch.optim import random_labels
from ghostbatch.train.capture import CapturedUpdate, choose_update
from ghostbatch.train.ranks import Ranks
from ghostbatch.train.state import initial_model
from ghostbatch.train.update import Update

NOISES = [{"label_noise": 0.3}, {"dropconnect": 0.3}, {"label_smoothing": 0.3}]


def gradients(recipe):
    """Return the gradients of a first update, which is not clipped, and its logged loss."""
    update = before_update(replace(recipe, clip=None))
    update()
    loss = update.state.monitor.state_dict()["sums"][0]
    return {name: p.grad for name, p in update.state.model.named_parameters()}, loss


def expected(recipe, labels=None, weights=None, smoothing=0.0):
    """Return the gradients of the first batch, with other labels or weights, and the true loss."""
    update = before_update(recipe)
    model, (batch,) = update.state.model, update.batches()
    outputs = functional_call(model, weights(model) if weights else {}, (batch.images,))
    wanted = batch.labels if labels is None else labels(batch.labels)
    F.cross_entropy(outputs, wanted, label_smoothing=smoothing).backward()
    loss = F.cross_entropy(outputs, batch.labels).item()
    return {name: p.grad for name, p in model.named_parameters()}, loss


def test_label_noise_trains_on_the_drawn_labels_and_logs_the_loss_of_the_true_ones(tiny):
    drawn = random_labels(tiny.batch, 10, 0.3, generator(tiny.seed, "labels", 0))
    assert (drawn >= 0).any()
    mine, logged = gradients(replace(tiny, label_noise=0.3))
    right, loss = expected(tiny, labels=lambda true: torch.where(drawn < 0, true, drawn))
    torch.testing.assert_close(mine, right)
    assert logged == pytest.approx(loss, rel=1e-5)
    assert not torch.allclose(mine["1.weight"], expected(tiny)[0]["1.weight"])


@pytest.mark.parametrize("noise", [0.0, 0.3], ids=["true labels", "drawn labels"])
def test_label_smoothing_is_that_of_pytorch_and_the_logged_loss_has_none(tiny, noise):
    drawn = random_labels(tiny.batch, 10, noise, generator(tiny.seed, "labels", 0))
    mine, logged = gradients(replace(tiny, label_noise=noise, label_smoothing=0.3))

    def labels(true):
        return torch.where(drawn < 0, true, drawn)

    right, loss = expected(tiny, labels=labels, smoothing=0.3)
    torch.testing.assert_close(mine, right)
    assert logged == pytest.approx(loss, rel=1e-5)
    assert not torch.allclose(mine["1.weight"], expected(tiny, labels=labels)[0]["1.weight"])


def test_dropconnect_has_the_gradients_of_a_network_with_masked_weights(tiny):
    position = BatchPosition()
    position.key.fill_(key(tiny.seed, "dropconnect", 0))

    def masked(model):
        return {
            name: weight * keep_mask(position, k, len(weight), weight.shape[1:], 0.3) / 0.7
            for k, (name, weight) in enumerate(connections(model).items())
        }

    mine, logged = gradients(replace(tiny, dropconnect=0.3))
    right, loss = expected(tiny, weights=masked)
    torch.testing.assert_close(mine, right)
    assert logged == pytest.approx(loss, rel=1e-5)


def test_every_update_has_its_own_draws_whatever_came_before(tiny):
    update = before_update(replace(tiny, label_noise=0.3, dropconnect=0.3))
    for number in (2, 0, 1):
        update.state.update = number
        update.prepare()
        drawn = random_labels(tiny.batch, 10, 0.3, generator(tiny.seed, "labels", number))
        assert torch.equal(update._labels, drawn)
        assert update.dropconnect._update.key == key(tiny.seed, "dropconnect", number)


@pytest.mark.parametrize(
    ("changes", "kind"),
    [({}, CapturedUpdate), ({"label_noise": 0.3}, CapturedUpdate), ({"dropconnect": 0.3}, Update)],
    ids=str,
)
def test_a_run_with_dropconnect_is_eager_on_a_gpu(tiny, changes, kind):
    plan = replace(tiny, **changes).plan(4000)
    state = SimpleNamespace(device=torch.device("cuda"), plan=plan)
    assert choose_update(state, object.__new__(TensorFeed), Ranks()) is kind


def test_dropconnect_masks_the_chosen_part_of_the_weights_and_restores_all(tiny):
    model = initial_model(tiny, load(tiny.data).info)
    before = {name: p.clone() for name, p in model.named_parameters()}
    drop = DropConnect(model, 0.25)
    seen = []
    for update in (1, 2, 1):
        drop.set_key(update)
        with drop.masked():
            seen.append({name: p.clone() for name, p in model.named_parameters()})
        assert all(torch.equal(before[name], p) for name, p in model.named_parameters())
    assert list(connections(model)) == ["1.weight", "4.weight", "7.weight"]
    for name, masked in seen[0].items():
        if name not in connections(model):
            assert torch.equal(masked, before[name])
            continue
        kept = masked != 0
        deviation = sqrt(0.25 * 0.75 / masked.numel())
        assert kept.float().mean() == pytest.approx(0.75, abs=4 * deviation)
        torch.testing.assert_close(masked[kept], before[name][kept] / 0.75)
        assert torch.equal(masked, seen[2][name])
        assert not torch.equal(masked, seen[1][name])


def test_a_label_is_replaced_with_the_probability_given_by_a_uniform_class():
    drawn = random_labels(100_000, 10, 0.2, generator(0, "test"))
    counts = torch.bincount(drawn + 1, minlength=11) / len(drawn)
    assert counts[0] == pytest.approx(0.8, abs=4 * sqrt(0.16 / 1e5))
    assert counts[1:] == pytest.approx([0.02] * 10, abs=4 * sqrt(0.02 / 1e5))


@pytest.mark.parametrize("noise", NOISES, ids=str)
def test_a_noisy_run_that_was_interrupted_ends_bit_identical(tiny, tmp_path, outcome, noise):
    recipe = replace(tiny, **noise)
    train(recipe, out=tmp_path / "whole", device="cpu")
    half_done(recipe, tmp_path / "cut", device="cpu")
    train(recipe, out=tmp_path / "cut", device="cpu")
    assert outcome(tmp_path / "cut") == outcome(tmp_path / "whole")


@pytest.mark.parametrize("noise", NOISES, ids=str)
def test_micro_batches_of_a_noisy_run_agree_to_rounding(tiny, noise):
    recipe = replace(tiny, **noise, precision="fp64")
    whole, split = (train(recipe, device="cpu", micro=micro) for micro in (None, 16))
    assert split.distance == pytest.approx(whole.distance, rel=1e-9)
    assert split.loss == pytest.approx(whole.loss, rel=1e-9)


def test_glorot_weights_have_its_variance_and_biases_are_zero(tiny):
    info = load("digits").info
    recipe = replace(tiny, model="f1", init="glorot")
    model = initial_model(recipe, info)
    for name, weight in connections(model).items():
        fans = weight.shape[0] + weight.shape[1]
        assert weight.abs().max() <= sqrt(6 / fans)
        assert weight.var().item() == pytest.approx(2 / fans, rel=0.1), name
    biases = [layer.bias for layer in model.modules() if isinstance(layer, nn.Linear)]
    assert len(biases) == 6
    assert not any(bias.any() for bias in biases)
    again = initial_model(recipe, info)
    torch.testing.assert_close(again.state_dict(), model.state_dict(), rtol=0, atol=0)
    assert len(connections(MODELS["c1"]())) == 5


@pytest.mark.parametrize("field", ["label_noise", "dropconnect", "label_smoothing"])
@pytest.mark.parametrize("value", [-0.1, 1.0, float("nan")])
def test_what_is_no_probability_below_one_is_refused_by_name(tiny, field, value):
    with pytest.raises(InputError, match=rf"^{field}: {value} is not a probability below 1; use 0"):
        replace(tiny, **{field: value})
