"""The ghost layers against nn.BatchNorm: the same layer wherever ghosts make no difference."""

import pytest
import torch
from norm_inputs import EACH_LAYER
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.testing import assert_close

import ghostbatch as gb


def batch(samples, *shape, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return 2 * torch.randn(samples, *shape, generator=draw, dtype=torch.float64) + 1


@EACH_LAYER
@pytest.mark.parametrize("ghost", [8, 1000])
@pytest.mark.parametrize(
    "options",
    [{}, {"momentum": None}, {"affine": False}, {"track_running_stats": False}, {"eps": 0.1}],
    ids=str,
)
def test_a_ghost_as_large_as_the_batch_is_batch_norm(
    ghost_layer, plain_layer, shape, ghost, options
):
    results = []
    for layer in (
        ghost_layer(3, ghost, dtype=torch.float64, **options),
        plain_layer(3, dtype=torch.float64, **options),
    ):
        for p, value in zip(layer.parameters(), (1.5, -0.5), strict=False):
            nn.init.constant_(p, value)
        for seed in (0, 1):
            x = batch(8, *shape, seed=seed).requires_grad_()
            y = layer(x)
            (y * batch(8, *shape, seed=2)).sum().backward()
        grads = [x.grad, *(p.grad for p in layer.parameters())]
        evaluated = layer.eval()(batch(5, *shape, seed=3))
        results.append([y, evaluated, *grads, *layer.state_dict().values()])
    assert_close(results[0], results[1])


@EACH_LAYER
def test_a_layer_normalises_each_ghost_of_its_batch_by_itself(ghost_layer, plain_layer, shape):
    x = batch(10, *shape)
    twin = plain_layer(3, dtype=torch.float64)
    layer = ghost_layer(3, 4, dtype=torch.float64)
    assert_close(layer(x), torch.cat([twin(piece) for piece in x.split((4, 4, 2))]))
    assert_close(layer.state_dict(), twin.state_dict())


@EACH_LAYER
def test_checkpoints_go_both_ways(ghost_layer, plain_layer, shape):
    ghost, plain = ghost_layer(3, 4), plain_layer(3)
    x = batch(9, *shape).float()
    for trained, fresh in ((ghost, plain_layer(3)), (plain, ghost_layer(3, 4))):
        trained(x)
        assert list(trained.state_dict()) == list(fresh.state_dict())
        fresh.load_state_dict(trained.state_dict())
        assert fresh.eval()(x).equal(trained.eval()(x))


def test_a_layer_is_a_batch_norm_whose_repr_shows_the_ghost():
    layer = gb.GhostBatchNorm2d(3, 32, running="mean")
    assert isinstance(layer, _BatchNorm)
    assert isinstance(layer, nn.BatchNorm2d)
    assert "GhostBatchNorm2d(3, eps=1e-05, momentum=0.1" in repr(layer)
    assert "ghost=32" in repr(layer)
    assert gb.GhostBatchNorm1d(3).ghost == 128


@EACH_LAYER
@pytest.mark.parametrize("training", [True, False])
def test_a_layer_without_bias_scales_and_does_not_shift(ghost_layer, plain_layer, shape, training):
    layer, twin = ghost_layer(3, 8, bias=False), plain_layer(3)
    twin.register_parameter("bias", None)
    for each in (layer.double().train(training), twin.double().train(training)):
        nn.init.constant_(each.weight, 1.5)
    assert list(layer.state_dict()) == list(twin.state_dict())
    assert_close(layer(batch(8, *shape)), twin(batch(8, *shape)))
    layer.reset_parameters()
    assert layer.bias is None
    assert layer.weight.tolist() == [1, 1, 1]
    layer.load_state_dict(twin.state_dict())
    assert not dict(ghost_layer(3, affine=False, bias=False).named_parameters())


@EACH_LAYER
def test_an_input_of_the_wrong_rank_is_refused_as_pytorch_refuses_it(
    ghost_layer, plain_layer, shape
):
    wrong = batch(8, *shape, 2, 2)
    with pytest.raises(ValueError, match="expected") as expected:
        plain_layer(3)(wrong)
    with pytest.raises(ValueError, match="expected") as raised:
        ghost_layer(3, 4)(wrong)
    assert str(raised.value) == str(expected.value)


@pytest.mark.parametrize("ghost", [0, -1, 2.5, True, None])
def test_a_layer_refuses_a_bad_ghost_at_construction(ghost):
    with pytest.raises(ValueError, match="is not a positive integer"):
        gb.GhostBatchNorm1d(3, ghost)
