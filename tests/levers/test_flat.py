"""Flat weights with their shadow, in Triton's interpreter, against torch.optim.SGD."""

import copy

import pytest
import torch
import torch.nn.functional as F
from flat import Flat
from fold import fold_convolutions
from torch import Tensor, nn
from torch.testing import assert_close

LR, MOMENTUM, DECAY = 0.1, 0.9, 1e-2


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.Conv2d(16, 16, 3, padding=1, bias=False),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, 2, 1, bias=False),
        nn.ReLU(),
        nn.Conv2d(32, 8, 3, padding=1),
        nn.Flatten(),
        nn.Linear(128, 5),
    )


def batch(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(6, 3, 8, 8, generator=generator), torch.arange(6) % 5


def flat_updates(model: nn.Module, most: float, losses: list[float]) -> tuple[Flat, Tensor]:
    """Train by `Flat.step`; a factor of each loss can make it infinite."""
    flat = Flat(model, torch.float32)
    rates, sums = torch.tensor([LR, MOMENTUM, DECAY, most]), torch.zeros(3)
    for update, factor in enumerate(losses):
        x, y = batch(update)
        loss = F.cross_entropy(model(x), y) * factor
        gradients = torch.autograd.grad(loss, flat.leaves)
        flat.step(gradients, rates, loss.detach(), sums)
    return flat, sums


def plain_updates(model: nn.Module, most: float, updates: int) -> Tensor:
    optimizer = torch.optim.SGD(model.parameters(), LR, MOMENTUM, weight_decay=DECAY)
    sums = torch.zeros(3)
    for update in range(updates):
        x, y = batch(update)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), most)
        sums += torch.tensor([float(norm), float(norm > most), 0.0])
        optimizer.step()
    return sums


@pytest.mark.parametrize("folds", [False, True], ids=["plain", "folded"])
@pytest.mark.parametrize("most", [0.05, 1e3], ids=["clipped", "not clipped"])
def test_updates_equal_those_of_sgd_with_clipping(folds, most):
    model = network()
    twin = copy.deepcopy(model)
    before = list(model.parameters())
    if folds:
        fold_convolutions(model)
    _, sums = flat_updates(model, most, [1.0] * 4)
    assert_close(sums, plain_updates(twin, most, 4))
    assert all(a is b for a, b in zip(model.parameters(), before, strict=True))
    for (name, mine), right in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert_close(mine, right, check_stride=False, msg=lambda m, name=name: f"{name}: {m}")


def test_an_update_that_is_not_finite_is_skipped_and_counted():
    model = network()
    twin = copy.deepcopy(model)
    _, sums = flat_updates(model, 5.0, [torch.inf, torch.nan])
    assert sums.tolist() == [0, 0, 2]
    for mine, right in zip(model.parameters(), twin.parameters(), strict=True):
        assert_close(mine, right, rtol=0, atol=0, check_stride=False)


def test_the_shadow_follows_the_weights():
    model = fold_convolutions(network())
    flat, _ = flat_updates(model, 5.0, [1.0, 1.0])
    shadow = flat.shadow.clone()
    flat.shadow.fill_(7)
    flat.refresh()
    used = flat.shadow != 7
    assert_close(flat.shadow[used], shadow[used], rtol=0, atol=0)
