"""Weights in flat buffers, in Triton's interpreter, against a torch optimizer."""

from math import inf

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.testing import assert_close

from ghostbatch.nn import fold_convolutions
from ghostbatch.ops.patches import patches
from ghostbatch.optim import decay_groups
from ghostbatch.train.monitor import FAR, PATIENCE, Monitor

pytestmark = pytest.mark.usefixtures("interpreted")
FlatWeights = pytest.importorskip("ghostbatch.nn.flat").FlatWeights


def network() -> nn.Module:
    """A first layer over patches, folded convolutions, norms, and a layer with a bias."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.Conv2d(16, 16, 3, padding=1),
        nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False),
        nn.Conv2d(32, 8, 3, padding=1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 5),
    )
    return fold_convolutions(model.to(memory_format=torch.channels_last))


def batch(number: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(number)
    return torch.randn(4, 3, 8, 8, generator=draw)


def scalar(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float64)


def step(flat, monitor, lr, *, loss=8.0, **rates):
    """A step of a batch of 4 with this summed loss; two answers were correct."""
    limits = {"batch": 4, "far": FAR, "patience": PATIENCE}
    rates = {"clip": inf, "momentum": 0.9, "weight_decay": 1e-2} | rates
    sums = torch.tensor([loss, 2.0, 0.0], dtype=torch.float64)
    flat.step(sums, monitor.numbers, monitor.diverged, torch.tensor(lr), **limits, **rates)


@pytest.mark.parametrize("clip", [inf, 0.05], ids=["not clipped", "clipped"])
@pytest.mark.parametrize("nesterov", [False, True], ids=["heavy ball", "nesterov"])
def test_steps_are_those_of_torch_sgd_after_clipping(clip, nesterov):
    model, twin = network(), network()
    parameters = list(model.parameters())
    flat, monitor = FlatWeights(model, torch.float32), Monitor(clip)
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    rates = {"momentum": 0.9, "weight_decay": 1e-2, "nesterov": nesterov}
    sgd = torch.optim.SGD(twin.parameters(), lr=0.1, **rates)
    norms = 0.0
    for number in range(3):
        flat(batch(number)).square().sum().backward()
        flat.take_gradients(add=False)
        step(flat, monitor, 0.1, clip=clip, **rates)
        sgd.zero_grad()
        twin(batch(number)).square().sum().backward()
        norms += float(clip_grad_norm_(twin.parameters(), clip))
        sgd.step()
    assert_close(model.state_dict(), twin.state_dict(), rtol=1e-4, atol=1e-5)
    assert_close(flat(batch(9)), twin(batch(9)), rtol=1e-4, atol=1e-5)
    kept = dict(flat.momentum())
    for mine, right in zip(model.parameters(), twin.parameters(), strict=True):
        assert_close(kept[mine], sgd.state[right]["momentum_buffer"], rtol=1e-3, atol=1e-4)
        assert mine.grad is None
    means = monitor.means()
    assert means["gradient_norm"] == pytest.approx(norms / 3, rel=1e-4)
    assert (means["loss"], means["accuracy"]) == (2.0, 50.0)
    assert means["clipped"] == (clip < inf)


def test_norms_and_biases_without_weight_decay_step_as_torch_sgds_second_group_does():
    """Without clipping, and with a decay that no tolerance would hide."""
    model, twin = network(), network()
    flat = FlatWeights(model, torch.float32, decay_groups(model)[1]["params"])
    rates = {"momentum": 0.9, "weight_decay": 2.0}
    sgd = torch.optim.SGD(decay_groups(twin), lr=0.05, **rates)
    before = [weight.detach().clone() for weight in model.parameters()]
    for number in range(2):
        flat(batch(number)).square().sum().backward()
        flat.take_gradients(add=False)
        step(flat, Monitor(None), 0.05, **rates)
        sgd.zero_grad()
        twin(batch(number)).square().sum().backward()
        sgd.step()
    assert_close(model.state_dict(), twin.state_dict(), rtol=1e-4, atol=1e-5)
    assert all(not w.equal(old) for w, old in zip(model.parameters(), before, strict=True))
    assert_close(flat(batch(9)), twin(batch(9)), rtol=1e-4, atol=1e-5)


def test_gradients_of_micro_batches_add_up():
    whole, parts = (FlatWeights(network().eval(), torch.float32) for _ in range(2))
    whole(batch(0)).sum().backward()
    whole.take_gradients(add=False)
    for number, part in enumerate(batch(0).split(2)):
        parts(part).sum().backward()
        parts.take_gradients(add=number > 0)
    for flat in (whole, parts):
        step(flat, Monitor(None), 1.0)
    for mine, right in zip(whole.model.parameters(), parts.model.parameters(), strict=True):
        assert_close(mine, right, rtol=1e-4, atol=1e-5)


def test_gradients_can_be_shown_where_an_optimizer_would_have_them():
    model, twin = network(), network()
    flat = FlatWeights(model, torch.float32)
    twin(batch(0)).square().sum().backward()
    flat(batch(0)).square().sum().backward()
    flat.take_gradients(add=False)
    flat.show_gradients()
    for mine, right in zip(model.parameters(), twin.parameters(), strict=True):
        assert_close(mine.grad, right.grad, rtol=1e-4, atol=1e-4)


def test_the_network_reads_the_weights_in_the_lower_precision():
    model = network()
    flat = FlatWeights(model, torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        expected, found = model(batch(0)), flat(batch(0))
        assert_close(flat(patches(batch(0).bfloat16(), 3)), found, rtol=0, atol=0)
    # The interpreter rounds bf16 to within one unit in the last place.
    assert_close(found, expected, rtol=0.02, atol=0.02)
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()
    flat.refresh()
    with torch.autocast("cpu", torch.bfloat16):
        assert not flat(batch(0)).any()


@pytest.mark.parametrize("loss", [torch.nan, torch.inf])
def test_an_update_that_is_not_finite_changes_no_weight(loss):
    flat, monitor = FlatWeights(network(), torch.float32), Monitor(None)
    before = {name: value.clone() for name, value in flat.model.state_dict().items()}
    for number in range(2):
        flat(batch(number)).sum().backward()
        flat.take_gradients(add=False)
        step(flat, monitor, 0.1, loss=loss)
    weights = {name: flat.model.state_dict()[name] for name, _ in flat.model.named_parameters()}
    assert all(torch.equal(before[name], weight) for name, weight in weights.items())
    reading = monitor.read()
    assert reading.skipped == 2
    assert str(loss) in reading.problem


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # NumPy's, as interpreter
def test_the_kernel_judges_as_the_monitor_does():
    """Losses that rise far, stay there, and end in NaN; then requests to stop."""
    flat = FlatWeights(nn.Linear(2, 1, bias=False), torch.float32)
    kernel, slow = Monitor(0.5), Monitor(0.5)
    losses = [4.0, 8.0, 50.0, *[90.0] * PATIENCE, torch.nan, 4.0]
    for number, loss in enumerate(losses):
        flat(torch.full((1, 2), float(number % 2))).sum().backward()
        norm = scalar(float(number % 2) * 2**0.5)
        flat.take_gradients(add=False)
        step(flat, kernel, 0.0, loss=loss, clip=0.5)
        slow.add(scalar(loss / 4), scalar(50.0), norm, scalar(0.0))
        assert_close(kernel.numbers, slow.numbers, equal_nan=True, rtol=1e-6, atol=1e-9)
        assert torch.equal(kernel.diverged, slow.diverged)
    assert slow.read().problem is not None
