"""Divergence is detected before it reaches the weights, and traced to its layer."""

import json
import math
import re
from dataclasses import replace

import pytest
import torch
from torch import nn

from ghostbatch import train
from ghostbatch.nn import MODELS
from ghostbatch.train import loop
from ghostbatch.train.divergence import find_nonfinite
from ghostbatch.train.monitor import FAR, PATIENCE, Monitor

PLAIN = torch.autocast("cpu", torch.bfloat16, enabled=False)

# ---------------------------------------------------------------------------------- the monitor


def add(monitor, loss, norm=1.0, accuracy=50.0, stop=0.0):
    monitor.add(*(torch.tensor(v, dtype=torch.float64) for v in (loss, accuracy, norm, stop)))
    return monitor.read()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_loss_or_gradient_norm_that_is_not_finite_is_divergence_at_once(bad):
    assert add(Monitor(5.0), bad).problem == f"the loss is {bad}"
    assert add(Monitor(5.0), 1.0, norm=bad).problem == f"the gradient's norm is {bad}"
    assert add(Monitor(5.0), 1.0, norm=1e300).problem is None


def diverges_at(monitor, losses):
    """Return the number of the loss at which the monitor reports divergence."""
    for number, loss in enumerate(losses, start=1):
        if add(monitor, loss).problem is not None:
            return number
    return None


def test_a_loss_far_above_the_first_for_a_hundred_consecutive_updates_is_divergence():
    assert (FAR, PATIENCE) == (10, 100)
    assert diverges_at(Monitor(None), [2.0] + [20.1] * 200) == 101
    assert diverges_at(Monitor(None), [2.0] + [20.0] * 200) is None, "ten times is not above it"
    assert diverges_at(Monitor(None), [2.0] + ([20.1] * 99 + [1.0]) * 5) is None, "not consecutive"


def test_a_monitor_continues_from_its_state():
    first, second = Monitor(5.0), Monitor(5.0)
    assert diverges_at(first, [2.0] + [30.0] * 60) is None
    second.load_state_dict(first.state_dict())
    assert second.state_dict() == first.state_dict()
    assert diverges_at(second, [30.0] * 60) == 40


def test_means_are_over_the_updates_since_the_last_call():
    monitor = Monitor(5.0)
    for loss, accuracy, norm in ((1.0, 10.0, 4.0), (3.0, 30.0, 6.0)):
        add(monitor, loss, norm, accuracy)
    assert monitor.means() == {"loss": 2, "accuracy": 20, "gradient_norm": 5, "clipped": 0.5}
    add(monitor, 7.0)
    assert monitor.means()["loss"] == 7


def test_after_divergence_updates_are_counted_and_change_nothing_else():
    monitor = Monitor(5.0)
    add(monitor, 1.0)
    for loss in (math.inf, 2.0, 3.0):
        reading = add(monitor, loss, stop=float(loss == 3.0))
    assert reading == ("the loss is inf", 3, True)
    assert float(monitor.diverged) == 1
    assert monitor.means()["loss"] == math.inf, "of the first update and the diverged one"


# ------------------------------------------------------------------------------------ the layer


class Spoil(nn.Module):
    """Makes a value infinite where the input is large, and passes gradients on as they are."""

    def forward(self, x):
        return torch.where(x > 1e3, torch.inf, x)


class Residual(nn.Module):
    """Spoils between its layers, by a function."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.outer = nn.Linear(2, 2)

    def forward(self, x):
        return self.outer(self.inner(x) / 0)


def network(*layers):
    """Return the layers in a row, with all parameters 1: ReLU might cut off what is drawn."""
    model = nn.Sequential(*layers)
    for parameter in model.parameters():
        nn.init.ones_(parameter)
    return model


def what(model, *inputs):
    found = find_nonfinite(model, inputs, PLAIN)
    return found.what if found else None


def test_the_layer_named_is_the_first_whose_output_is_not_finite():
    model = network(nn.Linear(2, 2), nn.ReLU(), Spoil(), nn.Linear(2, 2))
    assert what(model, torch.ones(3, 2)) is None
    assert what(model, torch.full((3, 2), 1e6)) == "output of layer 2 (Spoil)"


def test_every_piece_is_looked_at_and_the_earliest_layer_wins():
    model = network(Spoil(), nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight.data.fill_(3e38)
    fine, large, small = torch.zeros(3, 2), torch.full((3, 2), 1e6), torch.full((3, 2), 10.0)
    assert what(model, fine, small) == "output of layer 1 (Linear)"
    assert what(model, fine, small, large) == "output of layer 0 (Spoil)"


def test_weights_that_are_not_finite_are_named_before_what_they_spoil():
    model = network(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].bias.data[0] = math.nan
    assert what(model, torch.ones(3, 2)) == "bias of layer 1"


def test_what_a_function_between_layers_spoils_is_seen_in_the_next():
    assert what(network(Residual()), torch.ones(3, 2)) == "output of layer 0.outer (Linear)"


def test_what_the_last_function_spoils_is_seen_in_the_network():
    class Last(nn.Linear):
        def forward(self, x):
            return super().forward(x) / 0

    assert what(Last(2, 2), torch.ones(3, 2)) == "output of network"


def test_where_outputs_are_finite_it_is_the_gradient_nearest_to_the_loss():
    model = network(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    for layer in model[:2]:
        layer.weight.grad[0] = math.inf
    assert what(model, torch.ones(3, 2)) == "gradient of 1.weight"


def test_looking_leaves_no_hooks():
    model = network(nn.Linear(2, 2))
    find_nonfinite(model, [torch.ones(3, 2)], PLAIN)
    assert not model[0]._forward_hooks


# -------------------------------------------------------------------------------------- the run


class Steep(torch.autograd.Function):
    """The identity, with an infinite derivative where it is told so."""

    @staticmethod
    def forward(ctx, x, steep):
        ctx.steep = steep
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * (math.inf if ctx.steep else 1), None


class Turn(nn.Module):
    """Fine for ten updates."""

    def __init__(self, how):
        super().__init__()
        self.how, self.calls = how, 0

    def forward(self, x):
        self.calls += self.training
        if self.calls <= 10:
            return x
        return Steep.apply(x, True) if self.how == "gradient" else Spoil()(x * 1e9)


@pytest.fixture
def turning(monkeypatch):
    """A network whose values, or gradients, become infinite in update 11."""

    def build(how):
        def network(num_classes, *, in_channels, image_size):
            size = in_channels * image_size**2
            return nn.Sequential(
                nn.Flatten(), nn.Linear(size, 8), nn.ReLU(), Turn(how), nn.Linear(8, num_classes)
            )

        monkeypatch.setitem(MODELS, "turning", network)

    return build


@pytest.mark.parametrize("read_every", [1, 4])
@pytest.mark.parametrize(
    ("how", "problem", "where"),
    [
        ("loss", "the loss is (nan|inf)", r"output of layer 3 \(Turn\)"),
        ("gradient", "the gradient's norm is (nan|inf)", "gradient of 1.bias"),
    ],
    ids=["loss", "gradient"],
)
def test_a_diverged_update_leaves_the_weights_alone_and_is_named_however_late_it_is_read(
    tiny, tmp_path, turning, monkeypatch, how, problem, where, read_every
):
    turning(how)
    monkeypatch.setitem(loop.READ_EVERY, "cpu", read_every)
    recipe = replace(tiny, model="turning", ghost=None, regime=replace(tiny.regime, epochs=0.32))
    summary = train(recipe, out=tmp_path, evaluations=1, checkpoint_seconds=0)
    assert (summary.status, summary.updates) == ("diverged", 10)
    pattern = f"update 11: {problem}, first in the {where}; lower regime.lr or add regime.warmup"
    assert re.fullmatch(pattern, summary.reason), summary.reason
    written = json.loads((tmp_path / "summary.json").read_text())
    assert (written["status"], written["reason"]) == ("diverged", summary.reason)
    assert math.isfinite(summary.distance), "the weights are those of update 10"
    saved = torch.load(tmp_path / "checkpoint.pt", weights_only=True)["state"]
    assert saved["update"] <= 10
    assert all(tensor.isfinite().all() for tensor in saved["model"].values())
    assert train(recipe, out=tmp_path) == summary


def test_a_run_whose_loss_stays_far_above_its_first_is_given_up(tiny, monkeypatch):
    """A rate that is too high for plain SGD without norm, and too low for infinity."""

    def flat(num_classes, *, in_channels, image_size):
        layer = nn.Linear(in_channels * image_size**2, num_classes)
        return nn.Sequential(nn.Flatten(), layer)

    monkeypatch.setitem(MODELS, "flat", flat)
    wild = replace(
        tiny,
        model="flat",
        ghost=None,
        clip=None,
        regime=replace(tiny.regime, lr=1e4, epochs=4, drops=()),
    )
    summary = train(wild, evaluations=1)
    assert summary.status == "diverged"
    assert "has been above 10 x its first for 100" in summary.reason
    assert 100 <= summary.updates <= 110
