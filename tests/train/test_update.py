"""Updates of networks from elsewhere in bf16, and states that move between memory layouts."""

import sys
from dataclasses import replace

import pytest
import torch
from torch import nn

from ghostbatch import train
from ghostbatch.data import load
from ghostbatch.train.state import ONE_GHOST, State, norm_backend, use_gpu_layers


@pytest.mark.parametrize("network", ["tied", "head_in_fp32"])
def test_a_network_from_elsewhere_trains_in_bf16_as_autocast_allows(tiny, network):
    recipe = replace(tiny, model=f"python:small_networks:{network}", precision="bf16")
    assert train(recipe, device="cpu").status == "finished"


def test_a_layer_that_is_not_used_gets_no_gradient_in_bf16(tiny, tmp_path):
    recipe = replace(tiny, model="python:small_networks:half_used", precision="bf16")
    train(recipe, out=tmp_path, device="cpu")
    torch.manual_seed(0)
    state = torch.load(tmp_path / "checkpoint.pt", weights_only=True)["state"]
    assert torch.equal(state["model"]["unused.weight"], torch.ones(3, 3))


def test_momentum_takes_the_layout_of_the_weights(tiny):
    recipe = replace(tiny, model="c1", data="synthetic:3x8x8:128")
    info = load(recipe.data).info
    states = [State(recipe.plan(info.samples), info, torch.device("cpu")) for _ in range(2)]
    model = states[0].model
    model(torch.randn(16, 3, 8, 8)).sum().backward()
    states[0].optimizer.step()
    states[1].model.to(memory_format=torch.channels_last)
    states[1].load_state_dict(states[0].state_dict())
    kept = states[1].optimizer.state
    assert kept
    for weight, before in zip(states[1].model.parameters(), model.parameters(), strict=True):
        momentum = kept[weight]["momentum_buffer"]
        assert momentum.stride() == weight.stride()
        assert torch.equal(momentum, states[0].optimizer.state[before]["momentum_buffer"])


class Steps(nn.Module):
    """Normalises every step of (N, T, C) as a sample of its own."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x):
        return self.norm(x.flatten(0, 1))


def test_plain_norm_on_a_gpu_is_one_ghost_however_many_samples_it_sees(tiny):
    model, plain = Steps(), Steps()
    use_gpu_layers(model, replace(tiny, ghost=None, batch=64), one_rank=True)
    assert model.norm.ghost == ONE_GHOST
    x = torch.randn(64, 5, 3)
    torch.testing.assert_close(model(x), plain(x))
    torch.testing.assert_close(model.state_dict(), plain.state_dict())


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({}, "triton"),
        ({"ghost": None}, "triton"),
        ({"ghost": None, "precision": "fp64"}, "pytorch"),
    ],
)
def test_run_json_names_the_backend_that_a_gpu_uses(tiny, changes, name, monkeypatch):
    monkeypatch.setattr(sys.modules[State.__module__], "backend_name", lambda *_: "triton")
    assert norm_backend(replace(tiny, **changes), torch.device("cuda")) == name
