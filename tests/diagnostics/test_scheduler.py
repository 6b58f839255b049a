"""Drops by distance: when it is reached, when time is up at the latest, and resumable."""

import io
import json
from math import inf, nan

import numpy as np
import pytest
import torch
from torch import nn

from ghostbatch.diagnostics import DistanceScheduler, WeightDistance, distances_at
from ghostbatch.errors import InputError
from ghostbatch.optim import Regime

REGIME = Regime(lr=0.2, epochs=8, drops=((3, 0.1), (5, 0.02, 0.0)), weight_decay=0.1, warmup=0.5)
SIZES = {"samples_per_epoch": 80, "batch": 8}


class Road:
    """A distance that grows by the rate of every update, as if gradients were all 1."""

    def __init__(self, regime=REGIME, **options):
        self.weight = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        self.optimizer = torch.optim.SGD([self.weight], lr=0.2, weight_decay=0.1)
        self.scheduler = DistanceScheduler(
            self.optimizer, regime, distance=lambda: self.weight.abs().item(), **SIZES, **options
        )

    def go(self, updates):
        """Return rate and decay used at each update, and the distance after it."""
        seen = []
        for _ in range(updates):
            group = self.optimizer.param_groups[0]
            used = group["lr"], group["weight_decay"]
            with torch.no_grad():
                self.weight += group["lr"]
            self.optimizer.step()
            self.scheduler.step()
            seen.append((*used, self.weight.item()))
        return seen


def test_the_rate_drops_before_the_update_after_the_distance_is_reached():
    road = Road(reached=[2.05, 3.05])
    seen = road.go(40)
    distances = np.array([each[2] for each in seen])
    first, second = (int(np.argmax(distances >= d)) + 1 for d in (2.05, 3.05))
    assert road.scheduler.dropped == [first, second]
    assert [lr for lr, *_ in seen[:5]] == pytest.approx([0, 0.04, 0.08, 0.12, 0.16])  # warm-up
    assert {each[:2] for each in seen[5:first]} == {(0.2, 0.1)}
    assert {each[:2] for each in seen[first:second]} == {(0.1, 0.1)}
    assert {each[:2] for each in seen[second:]} == {(0.02, 0.0)}
    assert [road.scheduler.rates(u).lr for u in range(40)] == [lr for lr, *_ in seen]


def test_a_drop_comes_at_the_latest_when_its_time_is_up():
    road = Road(reached=[inf, 100.0], longest=[7, 4])
    road.go(20)
    assert road.scheduler.dropped == [7, 11]


def test_a_distance_that_is_reached_first_does_not_wait():
    road = Road(reached=[1.0, 100.0], longest=[50, 4])
    road.go(30)
    first, second = road.scheduler.dropped
    assert first < 15
    assert second == first + 4


@pytest.mark.parametrize("stop", [0, 1, 12, 13, 20, 30])
@pytest.mark.parametrize("optimizer_first", [True, False])
def test_a_run_resumed_in_the_middle_continues_identically(stop, optimizer_first):
    options = {"reached": [2.05, 3.05], "longest": [30, 30]}
    whole = Road(**options).go(40)
    road = Road(**options)
    road.go(stop)
    file = io.BytesIO()
    torch.save([road.weight, road.optimizer.state_dict(), road.scheduler.state_dict()], file)
    file.seek(0)
    weight, *states = torch.load(file, weights_only=True)
    again = Road(reached=[inf, inf])  # what it follows is in the checkpoint
    with torch.no_grad():
        again.weight.copy_(weight)
    parts = list(zip((again.optimizer, again.scheduler), states, strict=True))
    for part, state in parts if optimizer_first else parts[::-1]:
        part.load_state_dict(state)
    assert again.go(40 - stop) == whole[stop:]


def test_the_distance_may_be_that_of_a_model():
    layer = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    scheduler = DistanceScheduler(
        optimizer,
        Regime(lr=0.1, epochs=9, drops=((5, 0.01),)),
        distance=WeightDistance(layer),
        reached=[0.999],  # whatever the rounding of the weights
        **SIZES,
    )
    for _ in range(9):
        for parameter in layer.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        scheduler.step()
    assert scheduler.dropped == [5]  # 0.1 x sqrt(4) x 5 = 1


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("reached", {"reached": [1.0]}),
        ("reached", {"reached": [1.0, nan]}),
        ("reached", {"reached": [1.0, -1.0]}),
        ("longest", {"reached": [1.0, 2.0], "longest": [3]}),
    ],
)
def test_bad_input_is_refused_by_name(field, options):
    with pytest.raises(InputError) as raised:
        Road(**options)
    assert raised.value.field == field


def metrics(path, records):
    lines = [json.dumps({"update": u, "distance": d, "split": "train"}) for u, d in records]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_distances_between_records_are_linear_in_log_time(tmp_path):
    file = metrics(tmp_path / "m", [(0, 0.0), (1, 0.5), (10, 2.5), (1000, 6.5)])
    assert distances_at(file, [1, 10, 100]) == pytest.approx((0.5, 2.5, 4.5))


def test_records_that_do_not_reach_the_drop_are_refused(tmp_path):
    file = metrics(tmp_path / "m", [(1, 0.5), (10, 2.5), (20, None)])
    with pytest.raises(InputError, match=r"^reference: .* does not reach update 20; "):
        distances_at(file, [20])
    for bad in (tmp_path / "absent", tmp_path):
        with pytest.raises(InputError, match=r"^reference: .* cannot be read"):
            distances_at(bad, [1])
    file.write_text("mine\n")
    with pytest.raises(InputError, match=r"^reference: .* cannot be read"):
        distances_at(file, [1])
