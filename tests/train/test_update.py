"""Updates of networks from elsewhere in bf16, and states that move between memory layouts."""

import copy
import sys
from dataclasses import replace

import pytest
import torch
from half_done import half_done
from torch import nn

from ghostbatch import Regime, train
from ghostbatch.data import load
from ghostbatch.nn import MODELS
from ghostbatch.nn.fold import FoldedConv2d, PatchConv2d
from ghostbatch.train.state import (
    ONE_GHOST,
    State,
    initial_model,
    norm_backend,
    use_gpu_layers,
)
from ghostbatch.train.update import Update


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


DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Kernels of a GPU have no fp64. What fp32 rounds needs more samples, for well-conditioned ghosts.
DTYPE, SAMPLES, NUDGE = (
    (torch.float32, 64, 1e-6) if DEVICE.type == "cuda" else (torch.float64, 8, 1e-7)
)


@pytest.mark.parametrize("network", ["resnet44", "wresnet16-4", "vgg", "c1"])
@pytest.mark.parametrize("ghost", [None, SAMPLES // 2])
def test_the_layers_for_a_gpu_compute_what_plain_ones_do(tiny, network, ghost, monkeypatch):
    """To within ten times what rounding the weights does: ReLUs turn on or off."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    recipe = replace(tiny, model=network, ghost=ghost, data="synthetic:3x32x32:256")
    torch.manual_seed(0)
    plain = initial_model(recipe, load(recipe.data).info).to(DEVICE, DTYPE)
    for layer in plain.modules():
        if isinstance(layer, nn.Dropout):
            layer.p = 0.0
    fast, nudged = copy.deepcopy(plain), copy.deepcopy(plain)
    fast.to(memory_format=torch.channels_last)
    use_gpu_layers(fast, replace(recipe, precision="bf16"), one_rank=True)
    assert any(type(layer) in (FoldedConv2d, PatchConv2d) for layer in fast.modules())
    with torch.no_grad():
        for weight in nudged.parameters():
            weight.mul_(1 + NUDGE * torch.randn_like(weight))
    x = torch.randn(SAMPLES, 3, 32, 32, device=DEVICE, dtype=DTYPE)
    labels = torch.arange(SAMPLES, device=DEVICE) % 10
    gradients = []
    for model, layout in ((plain, "contiguous"), (nudged, "contiguous"), (fast, "channels_last")):
        images = x.contiguous(memory_format=getattr(torch, LAYOUTS[layout]))
        torch.nn.functional.cross_entropy(model(images), labels).backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    floor, error = (float((g - gradients[0]).norm() / gradients[0].norm()) for g in gradients[1:])
    assert error < max(1e-5, 10 * floor)
    for mine, right in zip(fast.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-3, atol=1e-4)


LAYOUTS = {"contiguous": "contiguous_format", "channels_last": "channels_last"}


# ------------------------------------------------------------------------------------ flat weights


def short(num_classes, *, in_channels, image_size):
    """A first layer over patches, a folded convolution, and dropout."""
    del image_size
    return nn.Sequential(
        nn.Conv2d(in_channels, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Dropout(0.5),
        nn.Linear(16, num_classes),
    )


@pytest.fixture
def flat_recipe(tiny, interpreted, monkeypatch):
    """A recipe whose weights lie in flat buffers, by kernels in Triton's interpreter."""
    del interpreted
    pytest.importorskip("ghostbatch.nn.flat")
    monkeypatch.setitem(MODELS, "short", short)
    initial = State.__init__

    def with_gpu_layers(self, plan, info, device):
        initial(self, plan, info, device)
        use_gpu_layers(self.model, plan.recipe, one_rank=True)

    monkeypatch.setattr(State, "__init__", with_gpu_layers)
    return replace(
        tiny,
        model="short",
        data="synthetic:3x8x8:64",
        batch=16,
        ghost=8,
        precision="bf16",
        augment=True,
        noise=True,
        ema=0.9,
        base_batch=8,
        regime=Regime(lr=0.05, epochs=1, drops=((0.5, 0.005, 0.0),)),
    )


def by_both(recipe, folder, monkeypatch):
    """Run with flat weights and without; compare momentum, and return the states in the end."""
    states = []
    for kernels in ("interpret", "0"):
        monkeypatch.setenv("GHOSTBATCH_KERNELS", kernels)
        train(recipe, out=folder / kernels, device="cpu")
        path = folder / kernels / "checkpoint.pt"
        states.append(torch.load(path, weights_only=True)["state"])
    fast, slow = states
    assert fast["monitor"]["sums"][-1] == slow["monitor"]["sums"][-1]  # updates
    for number, kept in slow["optimizer"]["state"].items():
        mine = fast["optimizer"]["state"][number]["momentum_buffer"]
        error = (mine - kept["momentum_buffer"]).norm() / kept["momentum_buffer"].norm()
        assert error < 0.1
    return fast, slow


@pytest.mark.parametrize("decay_norms", [True, False])
def test_a_run_with_flat_weights_is_that_of_the_optimizer_to_rounding(
    flat_recipe, tmp_path, monkeypatch, decay_norms
):
    regime = replace(flat_recipe.regime, weight_decay=2.0)
    flat_recipe = replace(flat_recipe, decay_norms=decay_norms, regime=regime)
    kinds = []
    begin = Update.__init__

    def noted(self, *arguments):
        begin(self, *arguments)
        kinds.append(self.flat is not None)

    monkeypatch.setattr(Update, "__init__", noted)
    fast, slow = by_both(flat_recipe, tmp_path, monkeypatch)
    assert kinds == [True, False]
    assert fast["optimizer"]["param_groups"] == slow["optimizer"]["param_groups"]
    near = {"rtol": 0.02, "atol": 0.02}
    torch.testing.assert_close(fast["model"], slow["model"], **near)
    torch.testing.assert_close(fast["average"]["sums"], slow["average"]["sums"], **near)


def test_a_run_with_flat_weights_that_was_interrupted_has_the_bits_of_one_that_was_not(
    flat_recipe, tmp_path, outcome
):
    train(flat_recipe, out=tmp_path / "one", device="cpu")
    half_done(flat_recipe, tmp_path / "two", 1, device="cpu")
    train(flat_recipe, out=tmp_path / "two", device="cpu")
    assert outcome(tmp_path / "one") == outcome(tmp_path / "two")


def test_a_batch_that_grows_steps_flat_weights_by_the_mean_of_its_batches(
    flat_recipe, tmp_path, monkeypatch
):
    """In one step, which flat weights do to the rounding of bf16."""
    regime = Regime(lr=0.05, epochs=1.5, drops=((0.5, 0.0125, 0.0),))
    recipe = replace(flat_recipe, noise=False, ema=None, grow=64, regime=regime, augment=False)
    sizes = []
    flat = sys.modules["ghostbatch.nn.flat"].FlatWeights
    step = flat.step

    def noted(self, *arguments, batch, **options):
        sizes.append(batch)
        step(self, *arguments, batch=batch, **options)

    monkeypatch.setattr(flat, "step", noted)
    by_both(recipe, tmp_path, monkeypatch)
    assert sizes == [16, 16, 64]
