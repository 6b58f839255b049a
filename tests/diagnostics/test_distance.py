"""The distance of the weights, against the norm of one long vector."""

from math import log10

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from saved import saved_and_loaded
from torch import nn
from torch.nn.utils import parameters_to_vector

from ghostbatch import GhostBatchNorm1d
from ghostbatch.diagnostics import WeightDistance, log_spaced
from ghostbatch.errors import InputError


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 2)).double()


def walk(model, seed=1):
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=draw, dtype=torch.float64))


def test_the_total_is_the_norm_of_the_weight_vector_and_of_the_distances_of_the_layers():
    model = network()
    start, walked = parameters_to_vector(model.parameters()).detach(), WeightDistance(model)
    assert walked.distance().total == 0
    walk(model)
    distance = walked.distance()
    expected = (parameters_to_vector(model.parameters()) - start).norm().item()
    assert float(distance) == distance.total == pytest.approx(expected, rel=1e-12)
    assert sum(layer**2 for layer in distance.layers.values()) == pytest.approx(expected**2)


def test_distances_of_layers_are_listed_by_parameter_name():
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


def test_a_resumed_process_measures_from_the_initial_weights():
    model = network()
    walked = WeightDistance(model)
    saved = saved_and_loaded(walked.state_dict())
    walk(model)
    resumed_model = network(seed=5)
    resumed_model.load_state_dict(model.state_dict())
    resumed = WeightDistance(resumed_model)
    assert resumed.distance().total == 0
    resumed.load_state_dict(saved)
    assert resumed.distance() == walked.distance()
    walk(resumed_model, seed=2)
    walk(model, seed=2)
    assert resumed.distance() == walked.distance()


def test_the_initial_weights_of_another_model_are_refused():
    with pytest.raises(ValueError, match="another model"):
        WeightDistance(network()).load_state_dict(WeightDistance(nn.Linear(4, 5)).state_dict())


@given(st.integers(1, 10**6), st.integers(1, 50))
def test_log_spaced_updates_are_roundings_of_an_even_grid_in_log_time(last, per_decade):
    updates = log_spaced(last, per_decade)
    assert updates == sorted(set(updates))
    assert (updates[0], updates[-1]) == (1, last)
    assert len(updates) <= per_decade * log10(last) + 2
    grid = 10 ** (np.arange(6 * per_decade + 1) / per_decade)
    gaps = np.abs(grid - np.array(updates)[:, None])
    assert (gaps[:-1].min(axis=1) <= 0.5).all()  # each but the last rounds a grid point
    assert (gaps[:, grid < last].min(axis=0) <= 0.5).all()  # each grid point has one


def test_layers_of_different_precision_are_measured_together():
    model = torch.nn.ModuleList(torch.nn.Linear(1, 1, bias=False) for _ in range(3))
    for layer, dtype in zip(model, (torch.float64, torch.float32, torch.bfloat16), strict=True):
        layer.to(dtype)
        torch.nn.init.zeros_(layer.weight)
    walked = WeightDistance(model)
    for layer, moved in zip(model, (2.0, 3.0, 6.0), strict=True):
        torch.nn.init.constant_(layer.weight, moved)
    assert walked.distance().total == 7.0


def wide_network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(60, 80), nn.BatchNorm1d(80), nn.Linear(80, 10))


def nudge(model, size, seed=1):
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=draw), alpha=size)


@pytest.mark.parametrize("size", [1e-4, 1e-2, 1.0])
def test_cpu_copies_are_exact_and_bf16_copies_within_their_error(size):
    model = wide_network()
    walked = {keep: WeightDistance(model, keep=keep) for keep in ("exact", "cpu", "bf16")}
    start = parameters_to_vector(model.parameters()).detach()
    rounding = (start - start.bfloat16().float()).norm().item()
    assert 0 < rounding < 2**-8 * start.norm().item()
    assert walked["bf16"].distance().total == 0
    nudge(model, size)
    exact, cpu, rounded = (walked[keep].distance() for keep in ("exact", "cpu", "bf16"))
    assert cpu == exact
    assert exact.error == 0
    assert rounded.error == pytest.approx(2 * rounding, rel=1e-4)
    off = abs(rounded.total - exact.total)
    assert off <= rounded.error
    assert off < 4 * rounding / len(start) ** 0.5  # four times the typical error


def test_a_bf16_copy_takes_half_the_memory_and_survives_a_checkpoint():
    model = wide_network()
    walked = WeightDistance(model, keep="bf16")
    assert {t.dtype for t in walked.state_dict()["start"].values()} == {torch.bfloat16}
    saved = saved_and_loaded(walked.state_dict())
    nudge(model, 0.1)
    for keep in ("bf16", "exact", "cpu"):
        resumed = WeightDistance(model, keep=keep)
        resumed.load_state_dict(saved)
        assert resumed.distance() == walked.distance()


def test_an_exact_copy_can_be_resumed_in_bf16():
    model = wide_network()
    exact = WeightDistance(model)
    nudge(model, 0.1)
    rounded = WeightDistance(model, keep="bf16")
    rounded.load_state_dict(exact.state_dict())
    assert rounded.distance().error > 0
    assert rounded.distance().total == pytest.approx(exact.distance().total, rel=1e-3)


@pytest.mark.parametrize(
    ("choice", "included"),
    [
        ({"norms": False}, {"0.weight", "0.bias", "2.weight", "2.bias"}),
        ({"biases": False}, {"0.weight", "1.weight", "2.weight"}),
        ({"norms": False, "biases": False}, {"0.weight", "2.weight"}),
    ],
    ids=["no norms", "no biases", "neither"],
)
def test_norm_and_bias_parameters_can_be_excluded(choice, included):
    model = network()
    walked, complete = WeightDistance(model, **choice), WeightDistance(model)
    walk(model)
    expected = {name: d for name, d in complete.distance().layers.items() if name in included}
    assert walked.distance().layers == expected
    assert walked.distance().total == pytest.approx(np.linalg.norm(list(expected.values())))


def test_ghost_norms_and_custom_norms_count_as_norms():
    class CustomRMSNorm(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(2))

    model = nn.Sequential(GhostBatchNorm1d(3), nn.LayerNorm(3), nn.GroupNorm(1, 3), CustomRMSNorm())
    assert WeightDistance(model, norms=False).distance().layers == {}


def test_the_distance_is_nan_if_a_weight_is():
    model = network()
    walked = WeightDistance(model)
    with torch.no_grad():
        model[0].weight[0, 0] = float("nan")
    assert np.isnan(walked.distance().total)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # from torch.compile
def test_a_compiled_model_has_the_parameter_names_of_the_model():
    model = network()
    assert (
        WeightDistance(torch.compile(model)).distance().layers.keys()
        == dict(model.named_parameters()).keys()
    )


def test_an_unknown_value_of_keep_is_refused():
    with pytest.raises(InputError, match=r"^keep: 'fp8' is unknown; choose one of exact, cpu"):
        WeightDistance(network(), keep="fp8")
