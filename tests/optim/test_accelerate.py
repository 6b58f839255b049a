"""Accelerate: its hooks are noticed, and its scheduler and its shards are what the docs say."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from launch_ranks import case_names, ranks_fixture
from torch import nn

import ghostbatch as gb
from ghostbatch.data import ExactBatchSampler

accelerate = pytest.importorskip("accelerate")
SCRIPT = Path(__file__).with_name("accelerate_ranks.py")
on_ranks = ranks_fixture(SCRIPT, 2)


@pytest.mark.parametrize("name", case_names(SCRIPT))
def test_on_ranks(on_ranks, name):
    on_ranks(name)


def first_drop(monkeypatch, *, prepared, **options):
    """Return the update at which the rate drops, if Accelerate believes in two processes."""
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = accelerate.Accelerator(cpu=True, **options)
    two = SimpleNamespace(num_processes=2)
    monkeypatch.setattr(accelerate.scheduler, "AcceleratorState", lambda: two)
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    regime = gb.Regime(lr=0.1, epochs=2, drops=((1, 0.01),))
    scheduler = gb.RegimeScheduler(optimizer, regime, samples_per_epoch=128, batch=16)
    model, optimizer = accelerator.prepare(model, optimizer)
    scheduler = accelerator.prepare(scheduler) if prepared else scheduler
    for update in range(16):
        if optimizer.param_groups[0]["lr"] < 0.05:
            return update
        accelerator.backward(model(torch.randn(2, 3)).sum())
        optimizer.step()
        scheduler.step()
    return None


def test_a_prepared_scheduler_steps_once_per_process(monkeypatch):
    assert first_drop(monkeypatch, prepared=True) == 4


def test_the_ways_that_the_docs_name_step_once_per_update(monkeypatch):
    split = accelerate.utils.DataLoaderConfiguration(split_batches=True)
    assert first_drop(monkeypatch, prepared=False) == 8
    assert first_drop(monkeypatch, prepared=True, dataloader_config=split) == 8
    assert first_drop(monkeypatch, prepared=True, step_scheduler_with_optimizer=False) == 8


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("rank", [0, 1])
def test_its_shards_of_the_exact_sampler_are_those_of_the_ranks(split, rank):
    """Without ``split_batches`` it gives every second list to each process, here half a micro."""
    sampler = ExactBatchSampler(20, 8, micro=4 if split else 2, ranks=1)
    shards = accelerate.data_loader.BatchSamplerShard(sampler, 2, rank, split_batches=split)
    expected = ExactBatchSampler(20, 8, micro=4, rank=rank, ranks=2)
    for _ in range(2):  # passes
        assert list(shards) == list(expected)
    assert len(shards) == len(expected)


def test_a_layer_with_one_of_its_hooks_is_named():
    model = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3))
    accelerate.hooks.add_hook_to_module(model[1], accelerate.hooks.ModelHook())
    with pytest.warns(UserWarning, match=r"forward was replaced, as Accelerate's .*: 1 \(Batch"):
        gb.to_ghost(model, 4)
    assert [type(layer) for layer in model] == [gb.GhostBatchNorm1d, nn.BatchNorm1d]
