"""The average of weights: PyTorch's own, the same at every batch, and put back exactly."""

import pytest
import torch
from saved import saved_and_loaded
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from ghostbatch.errors import InputError
from ghostbatch.optim import WeightAverage


def network():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 2))
    model[1].bias.requires_grad_(False)
    return model.double()


def walk(model, updates, *averages, seed=1):
    """Move the weights at random, and add them to the averages after each step."""
    draw = torch.Generator().manual_seed(seed)
    for _ in range(updates):
        with torch.no_grad():
            for weight in filter(lambda p: p.requires_grad, model.parameters()):
                weight.add_(torch.randn(weight.shape, generator=draw, dtype=weight.dtype))
        for average in averages:
            average()


def weights_in(average, model):
    with average.applied():
        return {name: weight.detach().clone() for name, weight in model.named_parameters()}


@pytest.mark.parametrize("updates", [1, 2, 7])
def test_it_is_pytorchs_average_with_factors_that_add_up_to_one(updates):
    model, decay = network(), 0.8

    def average_so_far(averaged, now, before):
        return averaged + (now - averaged) * (1 - decay) / (1 - decay ** (int(before) + 1))

    ours, theirs = WeightAverage(model, decay), AveragedModel(model, avg_fn=average_so_far)
    walk(model, updates, ours.update, lambda: theirs.update_parameters(model))
    torch.testing.assert_close(weights_in(ours, model), dict(theirs.module.named_parameters()))


def test_after_many_updates_it_is_pytorchs_exponential_average():
    model = network()
    ours = WeightAverage(model, 0.5)
    theirs = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    walk(model, 60, ours.update, lambda: theirs.update_parameters(model))
    torch.testing.assert_close(weights_in(ours, model), dict(theirs.module.named_parameters()))


@pytest.mark.parametrize("times", [2, 8])
def test_a_batch_that_is_so_many_times_larger_counts_as_so_many_updates_with_its_weights(times):
    model = network()
    small = WeightAverage(model, 0.9, batch=32, base_batch=32)
    large = WeightAverage(model, 0.9, batch=32 * times, base_batch=32)

    def add():
        large.update()
        for _ in range(times):
            small.update()

    walk(model, 5, add)
    torch.testing.assert_close(weights_in(large, model), weights_in(small, model))


@pytest.mark.parametrize("fails", [False, True])
def test_the_models_own_weights_come_back_bit_by_bit_and_buffers_stay(fails):
    model = network()
    average = WeightAverage(model, 0.9)
    walk(model, 3, average.update)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    try:
        with average.applied():
            changed = {n for n, value in model.state_dict().items() if not value.equal(before[n])}
            if fails:
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    assert changed == {"0.weight", "0.bias", "1.weight", "3.weight", "3.bias"}
    assert all(value.equal(before[name]) for name, value in model.state_dict().items())


def test_it_continues_from_a_checkpoint_bit_by_bit():
    model, again = network(), network()
    whole, first, second = (WeightAverage(m, 0.9) for m in (model, model, again))
    walk(model, 3, whole.update, first.update)
    weights, average = saved_and_loaded([model.state_dict(), first.state_dict()])
    again.load_state_dict(weights)
    second.load_state_dict(average)
    for network_, rest in ((model, whole), (again, second)):
        walk(network_, 3, rest.update, seed=2)
    mine, right = weights_in(second, again), weights_in(whole, model)
    assert all(mine[name].equal(right[name]) for name in right)
    with pytest.raises(ValueError, match="another model"):
        WeightAverage(nn.Linear(2, 2), 0.9).load_state_dict(average)


@pytest.mark.parametrize(
    ("field", "arguments"),
    [
        *(("decay", {"decay": value}) for value in (0, 1, -0.5, float("nan"))),
        ("batch", {"decay": 0.9, "batch": 0}),
        ("model", {"decay": 0.9, "model": nn.Flatten()}),
    ],
)
def test_a_bad_argument_is_refused_by_name(field, arguments):
    with pytest.raises(InputError, match=f"^{field}: "):
        WeightAverage(**{"model": nn.Linear(2, 2), **arguments})


def test_an_empty_average_is_refused():
    with pytest.raises(InputError, match=r"^average: it is empty; call update"):
        weights_in(WeightAverage(network(), 0.9), network())


def test_an_average_of_bf16_weights_is_that_of_the_same_weights_in_fp32():
    """Steps of 0.001 are lost in bf16."""
    layers = [torch.nn.Linear(1, 1, bias=False, dtype=t) for t in (torch.bfloat16, torch.float32)]
    averages = [WeightAverage(layer, 0.999) for layer in layers]
    for value in [1.0] * 800 + [3.0] * 800:
        for layer, average in zip(layers, averages, strict=True):
            torch.nn.init.constant_(layer.weight, value)
            average.update()
    narrow, wide = (average._sums["weight"] / average._total for average in averages)
    assert torch.equal(narrow, wide)
    with averages[0].applied():
        assert layers[0].weight.item() == pytest.approx(wide.item(), rel=0.01)
