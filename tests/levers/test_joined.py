"""Norms whose two gradients are added in their backward, in Triton's interpreter."""

import copy

import torch
from joined import join_gradients
from torch.testing import assert_close

import ghostbatch as gb
from ghostbatch.nn.networks import _residual


def test_a_residual_network_has_the_same_loss_gradients_and_statistics(monkeypatch):
    monkeypatch.setenv("GHOSTBATCH_KERNELS", "interpret")
    torch.manual_seed(0)
    # On CPUs, 1x1 convolutions with stride 2 of 4 channels corrupt the heap in torch 2.13.
    model = gb.to_ghost(_residual(5, 3, depth=2, widths=(16, 32)), 4)
    twin = copy.deepcopy(model)
    join_gradients(model)
    x = torch.randn(8, 3, 6, 6).contiguous(memory_format=torch.channels_last)
    results = [network(x) for network in (model, twin)]
    assert_close(*results)
    for result in results:
        result.square().sum().backward()
    for mine, right in zip(model.parameters(), twin.parameters(), strict=True):
        assert_close(mine.grad, right.grad, rtol=1e-4, atol=1e-4)
    for mine, right in zip(model.buffers(), twin.buffers(), strict=True):
        assert_close(mine, right)
