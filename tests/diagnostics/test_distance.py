"""The distance walked by the weights, against one long vector."""

import io
from math import log10

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import parameters_to_vector

from ghostbatch.diagnostics import WeightDistance, log_spaced


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 2)).double()


def walk(model, seed=1):
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=draw, dtype=torch.float64))


def test_the_total_is_the_norm_of_the_whole_weight_vector_and_the_root_of_the_layers_squares():
    model = network()
    start, walked = parameters_to_vector(model.parameters()).detach(), WeightDistance(model)
    assert walked.distance().total == 0
    walk(model)
    distance = walked.distance()
    expected = (parameters_to_vector(model.parameters()) - start).norm().item()
    assert float(distance) == distance.total == pytest.approx(expected, rel=1e-12)
    assert sum(layer**2 for layer in distance.layers.values()) == pytest.approx(expected**2)


def test_each_layer_has_its_own_distance_under_its_parameters_name():
    model = network()
    walked = WeightDistance(model)
    with torch.no_grad():
        model[0].weight[1, 2] += 3.0
        model[2].weight[:, 0] -= 2.0
    expected = dict.fromkeys(dict(model.named_parameters()), 0.0)
    expected |= {"0.weight": 3.0, "2.weight": 8**0.5}
    assert walked.distance().layers == pytest.approx(expected)


def test_frozen_parameters_and_buffers_do_not_count():
    model = network()
    model[0].requires_grad_(False)
    walked = WeightDistance(model)
    walk(model)
    moved = walked.distance()
    with torch.no_grad():
        model[0].weight += 100
    model(torch.ones(8, 4, dtype=torch.float64))  # moves the running statistics
    assert walked.distance() == moved
    assert set(moved.layers) == {"1.weight", "1.bias", "2.weight", "2.bias"}


def test_a_new_session_measures_from_the_old_start():
    model = network()
    walked = WeightDistance(model)
    file = io.BytesIO()
    torch.save(walked.state_dict(), file)
    file.seek(0)
    walk(model)
    resumed_model = network(seed=5)
    resumed_model.load_state_dict(model.state_dict())
    resumed = WeightDistance(resumed_model)
    assert resumed.distance().total == 0
    resumed.load_state_dict(torch.load(file, weights_only=True))
    assert resumed.distance() == walked.distance()
    walk(resumed_model, seed=2)
    walk(model, seed=2)
    assert resumed.distance() == walked.distance()


def test_the_start_of_another_model_is_refused():
    with pytest.raises(ValueError, match="another model"):
        WeightDistance(network()).load_state_dict(WeightDistance(nn.Linear(4, 5)).state_dict())


@given(st.integers(1, 10**6), st.integers(1, 50))
def test_log_spaced_updates_are_even_in_log_time_as_far_as_whole_numbers_allow(last, per_decade):
    updates = log_spaced(last, per_decade)
    assert updates == sorted(set(updates))
    assert (updates[0], updates[-1]) == (1, last)
    assert len(updates) <= per_decade * log10(last) + 2
    grid = 10 ** (np.arange(6 * per_decade + 1) / per_decade)
    gaps = np.abs(grid - np.array(updates)[:, None])
    assert (gaps[:-1].min(axis=1) <= 0.5).all()  # only roundings of grid points, and the last
    assert (gaps[:, grid < last].min(axis=0) <= 0.5).all()  # and every grid point has one


def test_layers_of_different_precision_are_measured_together():
    model = torch.nn.ModuleList(torch.nn.Linear(1, 1, bias=False) for _ in range(3))
    for layer, dtype in zip(model, (torch.float64, torch.float32, torch.bfloat16), strict=True):
        layer.to(dtype)
        torch.nn.init.zeros_(layer.weight)
    walked = WeightDistance(model)
    for layer, moved in zip(model, (2.0, 3.0, 6.0), strict=True):
        torch.nn.init.constant_(layer.weight, moved)
    assert walked.distance().total == 7.0
