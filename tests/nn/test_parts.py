"""Residual blocks that pass their results on twice, so that norms add the two gradients."""

import copy

import pytest
import torch
from torch.testing import assert_close

import ghostbatch as gb
from ghostbatch.nn.networks import _residual
from ghostbatch.nn.parts import join_gradients
from ghostbatch.ops.backends import select
from ghostbatch.train.divergence import find_nonfinite


@pytest.mark.parametrize("kernels", ["interpret", "0", "1"])
@pytest.mark.parametrize("ghost", [4, None])
def test_a_joined_network_has_the_same_loss_gradients_and_statistics(kernels, ghost, monkeypatch):
    if kernels == "interpret":
        pytest.importorskip("triton")
    monkeypatch.setenv(select.SWITCH, kernels)
    torch.manual_seed(0)
    # On CPUs, 1x1 convolutions with stride 2 of 4 channels corrupt the heap in torch 2.13.
    model = _residual(5, 3, depth=2, widths=(16, 32))
    if ghost is not None:
        gb.to_ghost(model, ghost)
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
    assert_close(model.eval()(x), twin.eval()(x))


@pytest.mark.parametrize("kernels", ["interpret", "0", "1"])
@pytest.mark.parametrize("options", [{}, {"activation": "relu"}], ids=str)
@pytest.mark.parametrize("residual", [False, True])
def test_a_norm_adds_the_gradients_of_its_two_results(kernels, options, residual, monkeypatch):
    if kernels == "interpret":
        pytest.importorskip("triton")
    monkeypatch.setenv(select.SWITCH, kernels)
    x, shortcut, dy, other = torch.randn(4, 8, 3, 5, 5).unbind()
    outcomes = []
    for twice in (True, False):
        leaves = [t.clone().requires_grad_() for t in (x, shortcut)]
        added = leaves[1] if residual else None
        y = gb.ghost_batch_norm(leaves[0], ghost=4, residual=added, twice=twice, **options)
        if twice:
            assert y[0].data_ptr() == y[1].data_ptr()
            torch.autograd.backward(y, (dy, other))
        else:
            y.backward(dy + other)
        outcomes.append([leaf.grad for leaf in leaves])
    assert_close(*outcomes, rtol=1e-5, atol=1e-5)


def test_one_of_two_results_may_be_left_unused():
    x = torch.randn(8, 3, requires_grad=True)
    first, second = gb.ghost_batch_norm(x, ghost=4, twice=True)
    (one,) = torch.autograd.grad(first.pow(3).sum(), x, retain_graph=True)
    (two,) = torch.autograd.grad(second.pow(3).sum(), x)
    assert_close(one, two)


@pytest.mark.parametrize("changed", [0, 1])
def test_writing_to_one_of_two_results_is_noticed(changed):
    x = torch.randn(8, 3, requires_grad=True)
    pair = gb.ghost_batch_norm(x, ghost=4, twice=True)
    loss = pair[1 - changed].square().sum()
    pair[changed].mul_(3)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_joined_network_names_the_layer_where_it_diverged():
    model = gb.to_ghost(_residual(5, 3, depth=2, widths=(16, 32)), 4)
    join_gradients(model)
    torch.nn.init.constant_(model.stage1[0].second.norm.weight, torch.inf)
    found = find_nonfinite(model, [torch.randn(8, 3, 6, 6)], torch.autocast("cpu", enabled=False))
    assert found.what == "weight of layer stage1.0.second.norm"
    torch.nn.init.ones_(model.stage1[0].second.norm.weight)
    model.stage1[0].second.norm.register_forward_hook(
        lambda _layer, _input, output: tuple(each * torch.inf for each in output)
    )
    found = find_nonfinite(model, [torch.randn(8, 3, 6, 6)], torch.autocast("cpu", enabled=False))
    assert found.what.startswith("output of layer stage1.0.second")
