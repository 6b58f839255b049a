"""Drops at a distance, or after the longest wait; resumed runs drop at the same updates."""

import json
from math import inf, nan

import numpy as np
import pytest
import torch
from saved import saved_and_loaded
from torch import nn

from ghostbatch.diagnostics import DistanceScheduler, distances_at
from ghostbatch.errors import InputError
from ghostbatch.optim import Regime

REGIME = Regime(lr=0.2, epochs=8, drops=((3, 0.1), (5, 0.02, 0.0)), weight_decay=0.1, warmup=0.5)
SIZES = {"samples_per_epoch": 80, "batch": 8}


class ConstantGradient:
    """One weight with a gradient of 1: the distance grows by the rate at every update."""

    def __init__(self, regime=REGIME, **options):
        self.weight = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        self.optimizer = torch.optim.SGD([self.weight], lr=0.2, weight_decay=0.1)
        self.scheduler = DistanceScheduler(
            self.optimizer, regime, distance=lambda: self.weight.abs().item(), **SIZES, **options
        )

    def run(self, updates):
        """Do some updates; return rate, weight decay and distance of each."""
        records = []
        for _ in range(updates):
            group = self.optimizer.param_groups[0]
            used = group["lr"], group["weight_decay"]
            with torch.no_grad():
                self.weight += group["lr"]
            self.optimizer.step()
            self.scheduler.step()
            records.append((*used, self.weight.item()))
        return records


def test_the_rate_drops_at_the_first_update_after_the_distance_is_reached():
    training = ConstantGradient(reached=[2.05, 3.05])
    records = training.run(40)
    distances = np.array([record[2] for record in records])
    first, second = (int(np.argmax(distances >= d)) + 1 for d in (2.05, 3.05))
    assert training.scheduler.dropped == [first, second]
    assert [lr for lr, *_ in records[:5]] == pytest.approx([0, 0.04, 0.08, 0.12, 0.16])  # warm-up
    assert {record[:2] for record in records[5:first]} == {(0.2, 0.1)}
    assert {record[:2] for record in records[first:second]} == {(0.1, 0.1)}
    assert {record[:2] for record in records[second:]} == {(0.02, 0.0)}
    assert [training.scheduler.rates(u).lr for u in range(40)] == [lr for lr, *_ in records]


def test_the_rate_drops_after_the_longest_wait_if_the_distance_is_not_reached():
    training = ConstantGradient(reached=[inf, 100.0], longest=[7, 4])
    training.run(20)
    assert training.scheduler.dropped == [7, 11]


def test_the_rate_drops_before_the_longest_wait_if_the_distance_is_reached():
    training = ConstantGradient(reached=[1.0, 100.0], longest=[50, 4])
    training.run(30)
    first, second = training.scheduler.dropped
    assert first < 15
    assert second == first + 4


@pytest.mark.parametrize("stop", [0, 1, 12, 13, 20, 30])
@pytest.mark.parametrize(
    "optimizer_first", [True, False], ids=["optimizer first", "scheduler first"]
)
def test_a_run_resumed_in_the_middle_continues_identically(stop, optimizer_first):
    options = {"reached": [2.05, 3.05], "longest": [30, 30]}
    expected = ConstantGradient(**options).run(40)
    stopped = ConstantGradient(**options)
    stopped.run(stop)
    states = [stopped.optimizer.state_dict(), stopped.scheduler.state_dict()]
    weight, *states = saved_and_loaded([stopped.weight, *states])
    resumed = ConstantGradient(reached=[inf, inf])  # the checkpoint has the distances
    with torch.no_grad():
        resumed.weight.copy_(weight)
    parts = list(zip((resumed.optimizer, resumed.scheduler), states, strict=True))
    for part, state in parts if optimizer_first else parts[::-1]:
        part.load_state_dict(state)
    assert resumed.run(40 - stop) == expected[stop:]


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("reached", {"reached": [1.0]}),
        ("reached", {"reached": [1.0, nan]}),
        ("reached", {"reached": [1.0, -1.0]}),
        ("longest", {"reached": [1.0, 2.0], "longest": [3]}),
    ],
    ids=["too few distances", "distance NaN", "negative distance", "too few waits"],
)
def test_bad_input_is_refused_by_name(field, options):
    with pytest.raises(InputError) as raised:
        ConstantGradient(**options)
    assert raised.value.field == field


def metrics(path, records):
    lines = [json.dumps({"update": u, "distance": d, "split": "train"}) for u, d in records]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_distances_between_records_are_interpolated_in_log_time(tmp_path):
    file = metrics(tmp_path / "m", [(0, 0.0), (1, 0.5), (10, 2.5), (1000, 6.5)])
    assert distances_at(file, [1, 10, 100]) == pytest.approx((0.5, 2.5, 4.5))


def test_metrics_that_are_too_short_or_unreadable_are_refused(tmp_path):
    file = metrics(tmp_path / "m", [(1, 0.5), (10, 2.5), (20, None)])
    with pytest.raises(InputError, match=r"^reference: .* does not reach update 20; "):
        distances_at(file, [20])
    for unreadable in (tmp_path / "absent", tmp_path):
        with pytest.raises(InputError, match=r"^reference: .* cannot be read"):
            distances_at(unreadable, [1])
    file.write_text("mine\n")
    with pytest.raises(InputError, match=r"^reference: .* cannot be read"):
        distances_at(file, [1])
