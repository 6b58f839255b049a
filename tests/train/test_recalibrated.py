"""The accuracy with recalibrated statistics: PyTorch's own averages, and nothing else changes."""

import copy
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from small_networks import narrow, without_norms
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.swa_utils import update_bn

from ghostbatch import Regime, train
from ghostbatch.data import PermutationStream, find_info, load
from ghostbatch.ops import ghost_sizes
from ghostbatch.train import evaluate, journal, read_summary
from ghostbatch.train.evaluate import (
    can_recalibrate,
    population_statistics,
    recalibration_batches,
)
from ghostbatch.train.load import evaluate_run, read_run
from ghostbatch.train.state import initial_model, use_gpu_layers

CPU = torch.device("cpu")


def by_pytorch(folder, recipe, updates, samples=4000, builder=narrow):
    """Return the accuracy of a run's network after PyTorch's own `update_bn`, ghost by ghost."""
    data = load("digits", holdout=recipe.holdout)
    network = builder()
    network.load_state_dict(
        torch.load(folder / "checkpoint.pt", weights_only=True)["state"]["model"]
    )
    for layer in network.modules():
        if isinstance(layer, _BatchNorm):
            layer.momentum = None
    stream = PermutationStream(samples, recipe.batch, recipe.seed)
    sizes = ghost_sizes(recipe.batch, recipe.ghost) if recipe.ghost else [recipe.batch]

    def prepared(images):
        return ((images - data.mean) / data.deviation).float()

    batches = (prepared(data.train.images[stream.indices(u)]) for u in range(updates))
    network.train()
    for layer in network.modules():
        if isinstance(layer, nn.Dropout | nn.Dropout2d):
            layer.p = 0.0
    update_bn((ghost for batch in batches for ghost in batch.split(sizes)), network)
    with torch.no_grad():
        outputs = network.eval()(prepared(data.test.images))
    return 100 * (outputs.argmax(1) == data.test.labels).double().mean().item()


@pytest.mark.parametrize(
    ("ghost", "micro"), [(None, None), (16, None), (20, None), (16, 48)], ids=str
)
def test_it_is_that_with_pytorchs_averages_over_the_runs_ghosts(tiny, tmp_path, ghost, micro):
    recipe = replace(tiny, batch=96, ghost=ghost, regime=Regime(lr=0.02, epochs=0.4))
    summary = train(recipe, out=tmp_path, device="cpu", micro=micro)
    assert summary.updates == 17
    expected = by_pytorch(tmp_path, recipe, updates=17)
    assert summary.recalibrated_accuracy == pytest.approx(expected, abs=0.11)  # one image
    if ghost is None:  # after 17 updates a sixth of the initial statistics is left
        assert abs(summary.recalibrated_accuracy - summary.accuracy) > 0.5
    assert evaluate_run(read_run(tmp_path), CPU, recalibrated=True).accuracy == pytest.approx(
        summary.recalibrated_accuracy, abs=0.11
    )


def test_it_is_over_all_batches_of_a_run_whose_batch_grows(tiny):
    def micro_batches(batch, _positions):
        return [SimpleNamespace(images=batch)]

    feed, plan = SimpleNamespace(micro_batches=micro_batches), replace(tiny, grow=128).plan(4000)
    assert (plan.updates, plan.batches) == (12, (1, 2))
    assert list(recalibration_batches(feed, plan, 12, [])) == list(range(16))


def test_it_is_on_held_out_images_where_the_accuracy_is(tiny, tmp_path):
    recipe = replace(tiny, holdout=1000)
    summary = train(recipe, out=tmp_path, device="cpu")
    expected = by_pytorch(tmp_path, recipe, updates=12, samples=3000)
    assert summary.recalibrated_accuracy == pytest.approx(expected, abs=0.11)


@pytest.mark.parametrize(
    ("limit", "epochs", "batches"),
    [(50_000, 0.256, 16), (50_000, 1.5, 62), (1000, 1.5, 15), (10, 1.5, 1)],
    ids=["what the run has seen", "one pass", "the limit", "but one batch"],
)
def test_it_takes_one_pass_over_the_training_set_at_most(tiny, monkeypatch, limit, epochs, batches):
    seen = []

    def count(model, batches):
        seen.extend(len(batch) for batch in batches)
        return model

    monkeypatch.setattr(evaluate, "RECALIBRATION_IMAGES", limit)
    monkeypatch.setattr(evaluate, "recalibrate", count)
    train(replace(tiny, regime=Regime(lr=0.05, epochs=epochs)), evaluations=1)
    assert seen == [64] * batches


def test_it_changes_no_other_number_of_a_run(tiny, tmp_path, outcome, monkeypatch):
    recipe = replace(tiny, model="python:small_networks:dropping", augment=True)
    train(recipe, out=tmp_path / "with")
    monkeypatch.setattr(journal, "can_recalibrate", lambda _model: False)
    train(recipe, out=tmp_path / "without")
    ours, theirs = (outcome(tmp_path / name) for name in ("with", "without"))
    assert theirs["summary"].pop("recalibrated_accuracy") is None
    assert ours["summary"].pop("recalibrated_accuracy") > 0
    assert ours == theirs


@pytest.mark.parametrize("fails", [False, True])
def test_the_networks_own_statistics_come_back_bit_by_bit(fails):
    network = narrow().train()
    network(torch.randn(8, 784))
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    objects = {name: id(tensor) for name, tensor in network.named_buffers()}
    try:
        with population_statistics(
            network, [torch.randn(8, 784)], torch.autocast("cpu", enabled=False)
        ):
            inside = {name: tensor.clone() for name, tensor in network.named_buffers()}
            if fails:
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    assert not inside["2.running_var"].equal(before["2.running_var"])
    assert all(tensor.equal(before[name]) for name, tensor in network.state_dict().items())
    assert {name: id(tensor) for name, tensor in network.named_buffers()} == objects
    assert all(module.training for module in network.modules())


@pytest.mark.parametrize(("model", "ghost"), [("resnet44", None), ("resnet44", 4), ("c1", None)])
def test_the_layers_of_a_gpu_get_the_same_averages(tiny, model, ghost):
    recipe = replace(tiny, model=model, data="synthetic:3x16x16:32", batch=8, ghost=ghost)
    plain = initial_model(recipe, find_info(recipe.data)).double()
    fast = copy.deepcopy(plain)
    use_gpu_layers(fast, replace(recipe, precision="bf16"), one_rank=True)
    draw = torch.Generator().manual_seed(0)
    batches = [torch.randn(8, 3, 16, 16, generator=draw).double() for _ in range(2)]
    found = []
    for network in (plain, fast):
        assert can_recalibrate(network)
        own = {name: tensor.clone() for name, tensor in network.named_buffers()}
        with population_statistics(network, batches, torch.autocast("cpu", enabled=False)):
            found.append({name: tensor.clone() for name, tensor in network.named_buffers()})
        assert all(tensor.equal(own[name]) for name, tensor in network.named_buffers())
    torch.testing.assert_close(found[1], found[0])


class NeedsMomentum(nn.BatchNorm1d):
    """A batch norm that conversion does not know, and that cannot do without a momentum."""

    def forward(self, x):
        self.momentum = float(self.momentum)
        return super().forward(x)


def custom(num_classes=10):
    return narrow(num_classes).append(NeedsMomentum(num_classes))


@pytest.mark.parametrize("build", [without_norms, custom])
def test_a_network_without_known_running_statistics_has_none(tiny, monkeypatch, build):
    monkeypatch.setattr("small_networks.narrow", build)
    summary = train(replace(tiny, ghost=None), evaluations=1)
    assert (summary.status, summary.recalibrated_accuracy) == ("finished", None)


def test_a_diverged_run_has_none(tiny):
    recipe = replace(tiny, regime=Regime(lr=1e30, epochs=0.256), clip=None)
    summary = train(recipe, evaluations=1)
    assert (summary.status, summary.recalibrated_accuracy) == ("diverged", None)


def test_image_folders_have_it_too(folder_recipe, tmp_path):
    recipe = replace(folder_recipe, augment=True)
    summary = train(recipe, out=tmp_path / "run", workers=1)
    found = evaluate_run(read_run(tmp_path / "run"), CPU, recalibrated=True)
    assert summary.recalibrated_accuracy == pytest.approx(found.accuracy)


def test_summaries_of_earlier_versions_have_none(tiny, tmp_path):
    train(tiny, out=tmp_path, evaluations=1)
    written = json.loads((tmp_path / "summary.json").read_text())
    for name in ("recalibrated_accuracy", "held_out", "checksum"):
        del written[name]
    (tmp_path / "summary.json").write_text(json.dumps(written))
    summary = read_summary(tmp_path / "summary.json")
    assert (summary.recalibrated_accuracy, summary.held_out) == (None, False)
