"""LARS and LAMB against their twins, one weight at a time, and against timm's."""

import copy

import pytest
import torch
from saved import saved_and_loaded
from torch import nn

from ghostbatch.errors import InputError
from ghostbatch.optim import LAMB, LARS, Regime, RegimeScheduler, norm_groups
from ghostbatch.optional import import_torchvision

KINDS = {"lars": LARS, "lamb": LAMB}
OPTIONS = {
    "lars": {"momentum": 0.8, "trust": 0.02},
    "lamb": {"betas": (0.8, 0.95), "eps": 1e-3},
}
SHAPES = [(3, 2), (5,), (), (2, 2, 3, 3)]


def lars_twin(w, g, kept, *, lr, weight_decay, adapt, momentum, trust):
    """Return the weights after one step, as the docstring of `LARS` writes it."""
    w_norm, g_norm = w.square().sum().sqrt(), g.square().sum().sqrt()
    ratio = 1.0
    if adapt and w_norm > 0 and g_norm > 0:
        ratio = trust * w_norm / (g_norm + weight_decay * w_norm)
    kept["m"] = momentum * kept.get("m", 0) + ratio * (g + weight_decay * w)
    return w - lr * kept["m"]


def lamb_twin(w, g, kept, *, lr, weight_decay, adapt, betas, eps):
    """Return the weights after one step, as the docstring of `LAMB` writes it."""
    kept["t"] = kept.get("t", 0) + 1
    kept["m"] = betas[0] * kept.get("m", 0) + (1 - betas[0]) * g
    kept["v"] = betas[1] * kept.get("v", 0) + (1 - betas[1]) * g * g
    mean, square = kept["m"] / (1 - betas[0] ** kept["t"]), kept["v"] / (1 - betas[1] ** kept["t"])
    u = mean / (square.sqrt() + eps) + weight_decay * w
    w_norm, u_norm = w.square().sum().sqrt(), u.square().sum().sqrt()
    ratio = w_norm / u_norm if adapt and w_norm > 0 and u_norm > 0 else 1.0
    return w - lr * ratio * u


TWINS = {"lars": lars_twin, "lamb": lamb_twin}


def groups_of(weights):
    """Return three groups: adapted, not adapted, and adapted without weight decay."""
    a, b, c, d = weights
    return [
        {"params": [a, d], "weight_decay": 0.1},
        {"params": [b], "adapt": False, "weight_decay": 0.2},
        {"params": [c], "lr": 0.5},
    ]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("special", ["nothing", "zero weights", "zero gradients", "no gradient"])
def test_many_weights_at_once_are_stepped_as_each_by_itself(kind, special):
    torch.manual_seed(0)
    weights = [nn.Parameter(torch.randn(shape, dtype=torch.float64)) for shape in SHAPES]
    if special == "zero weights":
        weights[0].data.zero_()
    optimizer = KINDS[kind](groups_of(weights), lr=0.3, **OPTIONS[kind])
    twins = [weight.detach().clone() for weight in weights]
    kept = [{} for _ in weights]
    for update in range(6):
        optimizer.param_groups[0]["lr"] = lr = 0.3 / (1 + update)
        for weight in weights:
            weight.grad = torch.randn_like(weight)
        if special == "zero gradients":
            weights[0].grad.zero_()
        if special == "no gradient" and update % 2:
            weights[0].grad = None
        rates = [(lr, 0.1, True), (0.3, 0.2, False), (0.5, 0.0, True), (lr, 0.1, True)]
        for i, (rate, weight_decay, adapt) in enumerate(rates):
            if (gradient := weights[i].grad) is not None:
                how = {"lr": rate, "weight_decay": weight_decay, "adapt": adapt, **OPTIONS[kind]}
                twins[i] = TWINS[kind](twins[i], gradient.clone(), kept[i], **how)
        optimizer.step()
        for weight, twin in zip(weights, twins, strict=True):
            torch.testing.assert_close(weight.detach(), twin, rtol=1e-12, atol=1e-12)


def network():
    torch.manual_seed(1)
    norms = (nn.Linear(6, 5, bias=False), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3))
    return nn.Sequential(*norms).double()


def train(model, optimizer, updates=10, scheduler=None):
    """Take some steps on random data, the same in every call."""
    data = torch.Generator().manual_seed(2)
    for _ in range(updates):
        x, y = (torch.randn(8, n, dtype=torch.float64, generator=data) for n in (6, 3))
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()


THEIRS = {
    "lars": ("Lars", {"momentum": 0.8, "trust_coeff": 0.02, "eps": 0}),
    "lamb": ("Lamb", {"betas": (0.8, 0.95), "eps": 1e-3, "max_grad_norm": None}),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("weight_decay", [0.0, 0.05])
def test_the_steps_are_those_of_timm(kind, weight_decay):
    """There, a group without weight decay is not adapted unless it is told to be."""
    import_torchvision()
    timm_optim = pytest.importorskip("timm.optim")
    name, options = THEIRS[kind]
    ours, theirs = network(), network()
    rates = {"lr": 0.1, "weight_decay": weight_decay}
    mine = KINDS[kind](norm_groups(ours, adapt=False, weight_decay=0.0), **rates, **OPTIONS[kind])
    groups = norm_groups(theirs, weight_decay=0.0, always_adapt=False)
    right = getattr(timm_optim, name)(groups, always_adapt=True, **rates, **options)
    for _ in range(10):  # one update each, the same data every time
        train(ours, mine, updates=1)
        train(theirs, right, updates=1)
        torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_a_rate_in_a_tensor_that_a_scheduler_fills_gives_the_bits_of_a_number(kind):
    models = network(), network()
    for model, lr in zip(models, (0.5, torch.tensor(0.5)), strict=True):
        optimizer = KINDS[kind](norm_groups(model, adapt=False), lr=lr, **OPTIONS[kind])
        regime = Regime(lr=0.5, epochs=10, drops=((4, 0.25),))
        sizes = {"samples_per_epoch": 8, "batch": 8}
        train(model, optimizer, scheduler=RegimeScheduler(optimizer, regime, **sizes))
        assert float(optimizer.param_groups[0]["lr"]) == 0.25
    assert optimizer.param_groups[0]["lr"] is lr
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_left_as_they_are(kind):
    weight = nn.Parameter(torch.ones(3, 2))
    weight.grad = gradient = torch.full((3, 2), 2.0)
    KINDS[kind]([weight], lr=0.1, weight_decay=0.1).step()
    assert weight.grad is gradient
    assert torch.equal(gradient, torch.full((3, 2), 2.0))


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_reads_no_number_back_from_the_device(kind):
    """Tensors on the meta device have none to read."""
    weights = [nn.Parameter(torch.empty(shape, device="meta")) for shape in SHAPES]
    optimizer = KINDS[kind](groups_of(weights), lr=0.1)
    optimizer.param_groups[0]["lr"] = torch.empty((), device="meta")
    optimizer.found_inf = torch.empty((), device="meta")
    for weight in weights:
        weight.grad = torch.empty_like(weight)
    optimizer.step()
    optimizer.step()
    with pytest.raises(RuntimeError, match="meta"):
        weights[0].norm().item()


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_resumed_in_the_middle_continues_identically(kind):
    whole, stopped = network(), network()
    optimizer = KINDS[kind](whole.parameters(), lr=0.1)
    train(whole, optimizer, updates=3)
    train(whole, optimizer, updates=3)
    optimizer = KINDS[kind](stopped.parameters(), lr=0.1)
    train(stopped, optimizer, updates=3)
    saved = saved_and_loaded([stopped.state_dict(), optimizer.state_dict()])
    resumed = network()
    resumed.load_state_dict(saved[0])
    optimizer = KINDS[kind](resumed.parameters(), lr=0.7)
    optimizer.load_state_dict(saved[1])
    train(resumed, optimizer, updates=3)
    for one, other in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one, other)


def test_steps_of_bf16_weights_are_counted_exactly_beyond_256_also_after_loading():
    weight = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = LAMB([weight], lr=1e-4)
    for part in range(2):
        for _ in range(300):
            weight.grad = torch.ones_like(weight)
            optimizer.step()
        assert optimizer.state[weight]["step"] == 300 * (part + 1)
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


@pytest.mark.parametrize("kind", KINDS)
def test_state_is_loaded_to_the_device_of_the_weights(kind):
    weight, elsewhere = (nn.Parameter(torch.ones(2, device=where)) for where in ("cpu", "meta"))
    optimizer, other = (KINDS[kind]([each], lr=0.1) for each in (weight, elsewhere))
    weight.grad = torch.ones(2)
    optimizer.step()
    other.load_state_dict(optimizer.state_dict())
    assert {kept.device.type for kept in other.state[elsewhere].values()} == {"meta"}


@pytest.mark.parametrize(
    ("kind", "options", "field"),
    [
        ("lars", {"lr": -0.1}, "lr"),
        ("lars", {"lr": 0.1, "momentum": -1}, "momentum"),
        ("lars", {"lr": 0.1, "trust": 0}, "trust"),
        ("lamb", {"lr": 0.1, "weight_decay": -1}, "weight_decay"),
        ("lamb", {"lr": 0.1, "betas": (0.9, 1)}, "beta2"),
        ("lamb", {"lr": 0.1, "eps": 0}, "eps"),
    ],
)
def test_options_out_of_range_are_refused(kind, options, field):
    with pytest.raises(InputError, match=f"^{field}: "):
        KINDS[kind]([nn.Parameter(torch.ones(1))], **options)
