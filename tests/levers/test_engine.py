"""Updates with all levers pulled against eager ones, on the CPU and in Triton's interpreter."""

import engine
import pytest
import torch
from engine import EAGER, Data, Levers, Update
from torch import nn
from torch.testing import assert_close

from ghostbatch.nn.networks import _residual, c1

NETWORKS = {
    "residual": lambda classes: _residual(classes, 3, depth=2, widths=(16, 32)),
    "pooling": lambda classes: c1(classes, image_size=8),
}


def test_clipping_by_grad_scale_and_skipping_by_found_inf_is_what_fused_sgd_does():
    torch.manual_seed(0)
    layers = [nn.Linear(5, 3) for _ in range(2)]
    layers[1].load_state_dict(layers[0].state_dict())
    fused, plain = (
        torch.optim.SGD(layer.parameters(), torch.tensor(0.1), 0.9, weight_decay=1e-2, fused=which)
        for layer, which in zip(layers, (True, False), strict=True)
    )
    for skipped in (0.0, 0.0, 1.0):
        x = torch.randn(4, 5)
        for layer in layers:
            layer.zero_grad()
            layer(x).square().sum().backward()
        norm = nn.utils.get_total_norm([p.grad for p in layers[0].parameters()])
        fused.grad_scale = ((norm + 1e-6) / 0.5).clamp(min=1.0)
        fused.found_inf = torch.tensor(skipped)
        fused.step()
        if not skipped:
            nn.utils.clip_grad_norm_(layers[1].parameters(), 0.5)
            plain.step()
    for mine, right in zip(layers[0].parameters(), layers[1].parameters(), strict=True):
        assert_close(mine, right)


@pytest.mark.slow
@pytest.mark.parametrize("network", NETWORKS)
def test_all_levers_together_train_as_eager_code_does(network, monkeypatch):
    monkeypatch.setenv("GHOSTBATCH_KERNELS", "interpret")
    monkeypatch.setattr(engine, "find_model", NETWORKS.get)
    data = Data.random(16, pixels=8)
    updates = [
        Update(
            network, data, batch=4, ghost=2, levers=levers, dtype=torch.float32, dropout=False
        ).capture()
        for levers in (Levers(), EAGER)
    ]
    draws = [updates[0].maker.draw(torch.Generator().manual_seed(n)) for n in range(2)]
    before = [p.detach().clone() for p in updates[0].model.parameters()]
    for update in updates:
        for batch in draws:
            update(batch)
    assert_close(updates[0].sums, updates[1].sums, rtol=1e-3, atol=1e-3)
    pairs = zip(*(update.model.parameters() for update in updates), before, strict=True)
    for mine, right, start in pairs:
        scale = (right - start).abs().max()
        assert_close((mine - right) / scale, torch.zeros_like(mine), rtol=0, atol=0.02)
