"""Folded convolutions against F.conv2d."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

from ghostbatch.errors import InputError
from ghostbatch.nn import fold_convolutions, unfold_convolutions
from ghostbatch.nn.fold import (
    FOLDS,
    FoldedConv2d,
    PatchConv2d,
    Shape,
    fold_weight,
    folded_conv2d,
    unfold_weight,
)
from ghostbatch.nn.networks import resnet44
from ghostbatch.ops.patches import patches

CASES = [
    *((shape, pixels, 16) for shape, pixels in FOLDS.items()),
    (Shape(16, 16, 3, 1), 2, 8),
    (Shape(3, 8, 3, 1), 4, 8),
    (Shape(3, 8, 5, 1), 2, 8),
    (Shape(3, 8, 5, 1), 8, 8),
    (Shape(4, 6, 3, 1), 1, 5),
    (Shape(4, 6, 3, 2), 4, 16),
    (Shape(4, 6, 5, 2), 2, 8),
    (Shape(4, 6, 1, 1), 2, 8),
]
LAYOUTS = {"channels_last": torch.channels_last, "contiguous": torch.contiguous_format}


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def outcome(convolve, *leaves: Tensor) -> list[Tensor]:
    """The result and all gradients."""
    leaves = tuple(leaf.detach().requires_grad_() for leaf in leaves)
    y = convolve(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, draw(*y.shape, seed=9))]


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize(("shape", "pixels", "width"), CASES, ids=str)
def test_results_and_gradients_equal_those_of_the_plain_convolution(shape, pixels, width, layout):
    fan_in, fan_out, kernel, stride = shape
    x = draw(3, fan_in, 6, width).contiguous(memory_format=layout)
    weight, bias = draw(fan_out, fan_in, kernel, kernel, seed=1), draw(fan_out, seed=2)

    def folded(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return folded_conv2d(x, fold_weight(weight, stride, pixels), bias, stride, pixels)

    fast = outcome(folded, x, weight, bias)
    slow = outcome(lambda *leaves: F.conv2d(*leaves, stride, kernel // 2), x, weight, bias)
    assert_close(fast, slow, rtol=1e-12, atol=1e-12, check_stride=False)


def test_channels_last_inputs_are_folded_without_a_copy(monkeypatch):
    x = draw(2, 16, 4, 8).contiguous(memory_format=torch.channels_last)
    placed = fold_weight(draw(16, 16, 3, 3), 1, 4)
    assert placed.is_contiguous(memory_format=torch.channels_last)
    seen = []
    convolve = F.conv2d
    monkeypatch.setattr(F, "conv2d", lambda x, *a: seen.append(x) or convolve(x, *a))
    y = folded_conv2d(x, placed, None, 1, 4)
    assert seen[0].shape == (2, 64, 4, 2)
    assert seen[0].data_ptr() == x.data_ptr()
    assert y.is_contiguous(memory_format=torch.channels_last)


def test_a_folded_network_computes_the_same_and_keeps_its_parameters():
    model = resnet44().double()
    twin = copy.deepcopy(model)
    before, keys = list(model.parameters()), list(model.state_dict())
    fold_convolutions(model)
    assert sum(isinstance(m, FoldedConv2d) for m in model.modules()) == 31
    assert all(a is b for a, b in zip(model.parameters(), before, strict=True))
    assert list(model.state_dict()) == keys
    x = draw(2, 3, 32, 32).contiguous(memory_format=torch.channels_last)
    for network in (model, twin):
        network(x).square().sum().backward()
    for mine, right in zip(model.parameters(), twin.parameters(), strict=True):
        scale = right.grad.abs().max()
        assert_close(mine.grad / scale, right.grad / scale, rtol=1e-9, atol=1e-9)


def test_unfolding_gives_the_plain_layers_back():
    model = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.Conv2d(3, 5, 3))
    twin = copy.deepcopy(model)
    unfold_convolutions(fold_convolutions(model))
    assert [type(layer) for layer in model] == [nn.Conv2d, nn.Conv2d]
    for layer, right in zip(model, twin, strict=True):
        assert vars(layer).keys() == vars(right).keys()


def test_an_odd_width_and_a_layer_called_alone_are_convolved_too():
    model = fold_convolutions(nn.Sequential(nn.Conv2d(16, 16, 3, padding=1))).double()
    (layer,) = model
    for width in (7, 8):
        x = draw(2, 16, 5, width)
        exact = F.conv2d(x, layer.weight, layer.bias, padding=1)
        assert_close(layer(x), exact, rtol=1e-12, atol=1e-12, check_stride=False)


def test_weights_are_read_anew_in_every_forward():
    model = fold_convolutions(nn.Sequential(nn.Conv2d(16, 16, 3, padding=1, bias=False)))
    x = torch.ones(1, 16, 4, 4)
    with torch.no_grad():
        first = model(x)
        model[0].weight.mul_(2)
        assert_close(model(x), 2 * first)


def test_autocast_casts_the_folded_weights():
    model = fold_convolutions(nn.Sequential(nn.Conv2d(16, 16, 3, padding=1, bias=False)))
    with torch.autocast("cpu", torch.bfloat16):
        y = model(torch.ones(1, 16, 4, 4))
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert model[0].weight.grad.dtype == torch.float32


@pytest.mark.parametrize(("shape", "pixels", "width"), CASES, ids=str)
def test_a_folded_weight_holds_the_plain_one(shape, pixels, width):
    del width
    fan_in, fan_out, kernel, stride = shape
    weight = draw(fan_out, fan_in, kernel, kernel)
    folded = fold_weight(weight, stride, pixels)
    assert torch.equal(unfold_weight(folded, kernel, stride, pixels), weight)


@pytest.mark.parametrize("kernel", [3, 5])
@pytest.mark.parametrize("bias", [False, True])
def test_a_first_layer_over_patches_computes_the_same(kernel, bias):
    model = nn.Sequential(nn.Conv2d(3, 64, kernel, padding=kernel // 2, bias=bias)).double()
    twin = copy.deepcopy(model)
    fold_convolutions(model)
    assert type(model[0]) is PatchConv2d
    x = draw(2, 3, 6, 7)
    for layout in LAYOUTS.values():
        for network in (model, twin):
            network.zero_grad()
            network(x.contiguous(memory_format=layout)).pow(2).sum().backward()
        for mine, right in zip(model.parameters(), twin.parameters(), strict=True):
            assert_close(mine.grad, right.grad, rtol=1e-11, atol=1e-9)
        assert_close(model(patches(x, kernel)), twin(x), rtol=1e-11, atol=1e-11)
    needed = x.clone().requires_grad_()
    assert_close(model(needed), twin(needed))
    assert type(unfold_convolutions(model)[0]) is nn.Conv2d


@pytest.mark.parametrize("channels", [1, 4])
@pytest.mark.parametrize("fan_out", [16, 64])
def test_a_folded_first_layer_refuses_other_channels_as_the_plain_one_does(channels, fan_out):
    model = nn.Sequential(nn.Conv2d(3, fan_out, 3, padding=1))
    x = torch.zeros(2, channels, 8, 8)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="channels"):
            model(x)
        fold_convolutions(model)
    assert type(model[0]) is not nn.Conv2d


def test_an_empty_batch_is_folded_too():
    model = fold_convolutions(nn.Sequential(nn.Conv2d(16, 16, 3, padding=1)))
    assert model(torch.zeros(0, 16, 8, 8)).shape == (0, 16, 8, 8)


def test_a_network_that_was_first_run_in_inference_mode_can_be_trained():
    model = fold_convolutions(nn.Sequential(nn.Conv2d(16, 32, 1, stride=2)))
    with torch.inference_mode():
        model(torch.ones(1, 16, 8, 8))
    model(torch.ones(1, 16, 8, 8)).sum().backward()
    assert model[0].weight.grad is not None


def test_groups_that_are_too_narrow_for_a_kernel_are_refused():
    folds = {Shape(3, 8, 5, 1): 1}
    with pytest.raises(InputError, match=r"^folds: a group of 1 pixels is too narrow"):
        fold_convolutions(nn.Conv2d(3, 8, 5, padding=2), folds)


def test_a_layer_with_a_forward_of_its_own_is_not_folded():
    layer = nn.Conv2d(16, 16, 3, padding=1)
    layer.forward = layer.forward
    assert type(fold_convolutions(layer)) is nn.Conv2d
