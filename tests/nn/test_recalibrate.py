"""Population statistics: exact averages over ghosts, and nothing else changes."""

import copy

import pytest
import torch
from model_parts import norms
from small_networks import Counting, Table
from torch import nn
from torch.optim.swa_utils import update_bn
from torch.testing import assert_close

import ghostbatch as gb
from ghostbatch.ops import ghost_sizes


def inputs(*sizes, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return [
        torch.randn(size, 3, 4, 4, generator=draw) * (1 + k) + k for k, size in enumerate(sizes)
    ]


def network(*, dropout=0.0):
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.BatchNorm2d(3), nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True)),
        *(nn.Dropout(dropout), nn.Flatten(), nn.Linear(16, 5), nn.BatchNorm1d(5, momentum=None)),
    )


def statistics(model):
    return [(norm.running_mean, norm.running_var) for norm in norms(model)]


def averages(ghosts):
    """Return the mean of the means and the mean of the unbiased variances per channel."""
    rows = [ghost.transpose(0, 1).flatten(1).double() for ghost in ghosts]
    means, variances = [r.mean(1) for r in rows], [r.var(1, unbiased=True) for r in rows]
    return torch.stack(means).mean(0), torch.stack(variances).mean(0)


@pytest.mark.parametrize("running", ["sequential", "mean"])
def test_a_ghost_layer_gets_the_mean_over_all_ghosts_of_their_means_and_variances(running):
    batches = inputs(12, 10, 4)
    layer = gb.GhostBatchNorm2d(3, ghost=4, running=running)
    assert gb.recalibrate(layer, batches) is layer
    ghosts = [g for batch in batches for g in batch.split(ghost_sizes(len(batch), 4))]
    assert len(ghosts) == 3 + 3 + 1
    mean, var = averages(ghosts)
    assert_close(layer.running_mean, mean.float())
    assert_close(layer.running_var, var.float())


def test_a_plain_layer_gets_the_mean_over_all_batches():
    batches, layer = inputs(12, 10, 4), nn.BatchNorm2d(3, momentum=0.3)
    mean, var = averages(batches)
    gb.recalibrate(layer, batches)
    assert_close(layer.running_mean, mean.float())
    assert_close(layer.running_var, var.float())


def test_a_deep_model_without_dropout_agrees_with_update_bn():
    batches, model = inputs(12, 10, 8), network()
    twin = copy.deepcopy(model)
    for norm in norms(twin):
        norm.momentum = None
    update_bn(batches, twin)
    gb.recalibrate(model.eval(), batches)
    assert_close(statistics(model), statistics(twin))
    assert not model.training


def test_a_whole_ghost_model_agrees_with_its_plain_twin_on_single_ghosts():
    batches, model = inputs(12, 8), network()
    twin = copy.deepcopy(model)
    gb.recalibrate(gb.to_ghost(model, 4), batches)
    gb.recalibrate(twin, [ghost for batch in batches for ghost in batch.split(4)])
    assert_close(statistics(model), statistics(twin))


def test_there_is_no_dropout():
    batches, results = inputs(12, 8), []
    for dropout in (0.0, 0.9):
        model = gb.to_ghost(network(dropout=dropout), 4)
        results.append(statistics(gb.recalibrate(model, batches)))
    assert_close(results[0], results[1], rtol=0, atol=0)


def test_a_layer_that_is_used_twice_counts_each_use():
    norm, (batch,) = nn.BatchNorm2d(3), inputs(12)
    gb.recalibrate(nn.Sequential(norm, nn.Hardtanh(0, 1), norm), [batch])
    middle = nn.BatchNorm2d(3)(batch).clamp(0, 1).detach()
    mean, var = averages([batch, middle])
    assert_close(norm.running_mean, mean.float())
    assert_close(norm.running_var, var.float())


def test_tuples_and_lists_give_their_first_item():
    results = []
    for wrap in (lambda x: x, lambda x: (x, "label"), lambda x: [x, 1]):
        results.append(statistics(gb.recalibrate(network(), [wrap(x) for x in inputs(8, 6)])))
    assert_close(results[0], results[1], rtol=0, atol=0)
    assert_close(results[0], results[2], rtol=0, atol=0)


class Drawing(nn.Module):
    """Draws random numbers in evaluation too, and counts its forwards."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x):
        self.calls += self.training
        return x + 0 * torch.rand(())


def everything_else(model):
    """All that `recalibrate` must leave alone, with the identity of every object."""
    return [
        {
            "type": type(m),
            "attributes": {k: id(v) for k, v in vars(m).items() if not k.startswith("_")},
            "values": {k: v.tolist() for k, v in m.state_dict().items() if "running_" not in k},
            "tensors": [(k, id(v)) for k, v in (*m._parameters.items(), *m._buffers.items())],
            "hooks": [len(m._forward_hooks), len(m._forward_pre_hooks)],
        }
        for m in model.modules()
    ]


@pytest.mark.parametrize("ghost", [None, 4])
def test_everything_but_the_running_statistics_stays(ghost):
    last = nn.BatchNorm1d(5, affine=False), Counting()
    model = nn.Sequential(Drawing(), *network(dropout=0.5), *last)
    if ghost:
        gb.to_ghost(model, ghost, running="mean")
    model.train()(inputs(8)[0])
    model[1].eval()
    model[3].track_running_stats = False
    model.zero_grad()
    before, old = everything_else(model), copy.deepcopy(statistics(model))
    state = torch.random.get_rng_state()
    gb.recalibrate(model, inputs(12, 8, seed=1))
    assert torch.random.get_rng_state().equal(state)
    assert everything_else(model) == before
    assert all(p.grad is None for p in model.parameters())
    for ours, theirs in zip(statistics(model), old, strict=True):
        assert not any(a.equal(b) for a, b in zip(ours, theirs, strict=True))


def test_statistics_that_are_not_finite_are_replaced():
    layer = nn.BatchNorm2d(3)
    layer.running_mean.fill_(torch.nan)
    gb.recalibrate(layer, inputs(12))
    assert layer.running_mean.isfinite().all()


def test_after_an_error_the_model_is_as_before():
    model = gb.to_ghost(network(), 4)
    before, values = everything_else(model), copy.deepcopy(model.state_dict())
    with pytest.raises(RuntimeError):
        gb.recalibrate(model, [*inputs(8), torch.randn(8, 5, 4, 4)])
    assert everything_else(model) == before
    assert_close(model.state_dict(), values, rtol=0, atol=0)


def test_a_cache_that_a_forward_has_made_stays():
    model = nn.Sequential(Table(), *network())
    gb.recalibrate(model, inputs(8, 12))
    assert model[0].size == len(model[0].table) == 12
    model(inputs(12)[0])


def test_a_buffer_that_shares_memory_with_itself_may_stay_as_it_is():
    model = network()
    model.register_buffer("ones", torch.ones(1).expand(16))
    gb.recalibrate(model, inputs(8))
    assert model.ones.shape == (16,)


def test_a_single_tensor_is_not_taken_for_many_batches():
    with pytest.raises(gb.InputError, match=r"^batches: this is a single tensor"):
        gb.recalibrate(network(), inputs(8)[0])


def test_no_batches_are_refused():
    model = network()
    used = iter(inputs(8))
    list(used)
    with pytest.raises(gb.InputError, match=r"^batches: no norm layer has seen one; pass at least"):
        gb.recalibrate(model, used)
    gb.recalibrate(nn.Linear(2, 2), [])


@pytest.mark.parametrize("layer", [nn.BatchNorm2d(3), gb.GhostBatchNorm2d(3, 4)], ids=str)
def test_an_empty_batch_does_not_count(layer):
    twin, batches = copy.deepcopy(layer), inputs(8, 4)
    gb.recalibrate(layer, [batches[0], batches[0][:0], batches[1]])
    assert_close(layer.state_dict(), gb.recalibrate(twin, batches).state_dict())


def test_a_layer_that_is_not_run_keeps_its_statistics():
    model = nn.BatchNorm2d(3)
    model.unused = nn.BatchNorm1d(3)
    gb.recalibrate(model, inputs(8))
    assert model.unused.running_mean.equal(torch.zeros(3))
    assert not model.running_mean.equal(torch.zeros(3))


def test_layers_without_running_statistics_are_left_alone():
    model = nn.Sequential(nn.BatchNorm2d(3, track_running_stats=False), nn.BatchNorm2d(3))
    gb.recalibrate(model, inputs(8))
    assert model[0].running_mean is None
    assert_close(model[1].running_mean, torch.zeros(3), rtol=0, atol=1e-5)


def test_a_compiled_model_is_recalibrated_too():
    batches = inputs(12, 8)
    model, twin = (gb.to_ghost(network(), 4) for _ in range(2))
    compiled = torch.compile(model, backend="eager")
    compiled.eval()(batches[0])
    assert gb.recalibrate(compiled, batches) is compiled
    assert_close(statistics(model), statistics(gb.recalibrate(twin, batches)))
