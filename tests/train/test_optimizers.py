"""Runs with AdamW, LARS and LAMB: what they are built with, and that they continue."""

import json
import sys
from dataclasses import replace

import pytest
import torch
from half_done import half_done

from ghostbatch import Recipe, train
from ghostbatch.data import find_info
from ghostbatch.optim import SGD, AdamW, LAMBSpec, LARSSpec
from ghostbatch.train.ranks import Ranks
from ghostbatch.train.state import State
from ghostbatch.train.update import Update, uses_flat_weights

SPECS = [AdamW(beta2=0.99), LARSSpec(trust=0.1), LAMBSpec(beta2=0.99)]


def state_of(recipe):
    info = find_info(recipe.data)
    return State(recipe.plan(info.samples), info, torch.device("cpu"))


@pytest.mark.parametrize("spec", SPECS, ids=[spec.kind for spec in SPECS])
def test_a_run_that_was_interrupted_has_the_bits_of_one_that_was_not(tiny, tmp_path, outcome, spec):
    recipe = replace(tiny, optimizer=spec, decay_norms=False)
    train(recipe, out=tmp_path / "one", device="cpu")
    half_done(recipe, tmp_path / "two", device="cpu")
    train(recipe, out=tmp_path / "two", device="cpu")
    assert outcome(tmp_path / "one") == outcome(tmp_path / "two")
    assert outcome(tmp_path / "one")["summary"]["loss"] < 2, "it trains: at first it is 2.3"
    header = json.loads((tmp_path / "one" / "run.json").read_text())
    assert Recipe.from_dict(header["recipe"]) == recipe


@pytest.mark.parametrize("decay_norms", [True, False])
@pytest.mark.parametrize("spec", SPECS[1:], ids=["lars", "lamb"])
def test_norms_and_biases_are_not_adapted_whether_they_decay_or_not(tiny, spec, decay_norms):
    state = state_of(replace(tiny, optimizer=spec, decay_norms=decay_norms))
    weights, others = state.optimizer.param_groups
    assert [weight.ndim for weight in weights["params"]] == [2, 2, 2]
    assert [weight.ndim for weight in others["params"]] == [1] * 7
    assert (weights["adapt"], others["adapt"]) == (True, False)
    decay = tiny.regime.weight_decay
    assert (weights["weight_decay"], others["weight_decay"]) == (decay, decay * decay_norms)


def test_the_optimizer_of_a_large_batch_has_the_betas_that_go_with_its_rate(tiny):
    scaled = replace(tiny, batch=128, optimizer=AdamW())  # 4 x base_batch, rate x 2
    (group,) = state_of(scaled).optimizer.param_groups
    assert group["lr"] == 2 * tiny.regime.lr
    assert group["betas"] == pytest.approx((0.6, 0.996))
    assert group["eps"] == pytest.approx(5e-9)
    (group,) = state_of(replace(scaled, lr_rule="linear")).optimizer.param_groups
    assert (group["betas"], group["eps"]) == ((0.9, 0.999), 1e-8)


@pytest.mark.parametrize("spec", [SGD(), *SPECS], ids=["sgd", "adamw", "lars", "lamb"])
def test_only_sgd_has_kernels_that_step_all_weights_at_once(tiny, spec, monkeypatch):
    monkeypatch.setattr(sys.modules[Update.__module__], "has_triton", lambda _: True)
    recipe = replace(tiny, model="f1", precision="bf16", optimizer=spec)
    assert uses_flat_weights(state_of(recipe), Ranks()) == (spec == SGD())


def test_a_checkpoint_from_a_cuda_graph_leaves_adamw_what_it_is_without_one(tiny):
    state = state_of(replace(tiny, optimizer=AdamW()))
    saved = state.state_dict()
    saved["optimizer"]["param_groups"][0]["capturable"] = True
    state.load_state_dict(saved)
    assert state.optimizer.param_groups[0]["capturable"] is False
