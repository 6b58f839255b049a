"""Ghost batch norm against PyTorch's own batch norm, ghost by ghost, and closed forms."""

from math import ceil

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from norm_inputs import draw
from torch import Tensor
from torch.testing import assert_close

from ghostbatch.ops import ghost_batch_norm, ghost_batch_norm_reference, ghost_sizes

CHANNELS = 3
BOTH = pytest.mark.parametrize("norm", [ghost_batch_norm_reference, ghost_batch_norm])


def statistics(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    return torch.arange(1, CHANNELS + 1, dtype=dtype), torch.full((CHANNELS,), 0.5, dtype=dtype)


def by_hand(x: Tensor, sizes: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Means and unbiased variances of the ghosts, one row each."""
    flat = [piece.transpose(0, 1).flatten(1) for piece in x.split(sizes)]
    return torch.stack([p.mean(1) for p in flat]), torch.stack([p.var(1) for p in flat])


@given(st.integers(1, 10_000), st.integers(1, 2_000).filter(lambda ghost: ghost != 2))
def test_the_last_ghost_holds_between_half_and_one_and_a_half_ghosts(samples, ghost):
    *first, last = ghost_sizes(samples, ghost)
    assert sum(first) + last == samples
    assert set(first) <= {ghost}
    if samples < ghost:
        assert (first, last) == ([], samples)
    else:
        assert ceil(ghost / 2) <= last <= ceil(3 * ghost / 2) - 1


@given(st.integers(2, 10_000))
def test_ghosts_of_two_are_pairs_and_in_an_odd_batch_end_in_three(samples):
    assert ghost_sizes(samples, 2) == (2,) * (samples // 2 - 1) + (2 + samples % 2,)


@BOTH
@pytest.mark.parametrize("inner", [(), (5,), (4, 2), (2, 3, 2)], ids=["2d", "3d", "4d", "5d"])
@pytest.mark.parametrize(
    ("samples", "ghost", "sizes"),
    [
        (12, 4, (4, 4, 4)),
        (10, 4, (4, 4, 2)),
        (9, 4, (4, 5)),
        (7, 3, (3, 4)),
        (3, 4, (3,)),
        (8, 8, (8,)),
        (7, 2, (2, 2, 3)),
    ],
)
def test_outputs_gradients_and_statistics_are_those_of_batch_norm_on_each_ghost(
    norm, inner, samples, ghost, sizes
):
    x, upstream = draw(samples, CHANNELS, *inner), draw(samples, CHANNELS, *inner, seed=1)
    results = []
    for ours in (True, False):
        leaves = [x.clone(), draw(CHANNELS, seed=2), draw(CHANNELS, seed=3)]
        inputs, weight, bias = (leaf.requires_grad_() for leaf in leaves)
        mean, var = statistics()
        if ours:
            y = norm(inputs, mean, var, weight, bias, ghost=ghost, momentum=0.3, eps=1e-3)
        else:
            pieces = inputs.split(sizes)
            y = torch.cat(
                [F.batch_norm(p, mean, var, weight, bias, True, 0.3, 1e-3) for p in pieces]
            )
        y.backward(upstream)
        results.append([y.detach(), *(leaf.grad for leaf in leaves), mean, var])
    assert_close(results[0], results[1])


@BOTH
def test_sequential_statistics_follow_the_closed_form(norm):
    m, sizes = 0.2, (4, 4, 4, 2)
    x, (mean, var), (mean_0, var_0) = draw(14, CHANNELS, 3), statistics(), statistics()
    norm(x, mean, var, ghost=4, momentum=m)
    weights = torch.tensor([m * (1 - m) ** (4 - k) for k in (1, 2, 3, 4)], dtype=x.dtype)
    means, variances = by_hand(x, sizes)
    assert_close(mean, (1 - m) ** 4 * mean_0 + weights @ means)
    assert_close(var, (1 - m) ** 4 * var_0 + weights @ variances)


@BOTH
def test_no_momentum_averages_all_ghosts_alike(norm):
    (mean, var), tracked = statistics(), torch.tensor(0)
    batches = [draw(12, CHANNELS, 3), draw(10, CHANNELS, 3, seed=1)]
    for x in batches:
        norm(x, mean, var, ghost=4, momentum=None, num_batches_tracked=tracked)
    ghosts = [by_hand(x, (4, 4, len(x) - 8)) for x in batches]
    assert tracked == 6
    assert_close(mean, torch.cat([means for means, _ in ghosts]).mean(0))
    assert_close(var, torch.cat([variances for _, variances in ghosts]).mean(0))


@BOTH
def test_the_mean_policy_is_one_update_by_the_unweighted_mean_over_ghosts(norm):
    x, (mean, var), (mean_0, var_0) = draw(9, CHANNELS, 3), statistics(), statistics()
    norm(x, mean, var, ghost=4, momentum=0.2, running="mean")
    means, variances = by_hand(x, (4, 5))
    assert_close(mean, 0.8 * mean_0 + 0.2 * means.mean(0))
    assert_close(var, 0.8 * var_0 + 0.2 * variances.mean(0))


@BOTH
@pytest.mark.parametrize(("running", "grown"), [("sequential", 3), ("mean", 1)])
def test_batches_tracked_count_ghosts_or_with_the_mean_policy_batches(norm, running, grown):
    tracked = torch.tensor(7)
    norm(draw(12, 3), *statistics(), ghost=4, running=running, num_batches_tracked=tracked)
    assert tracked == 7 + grown


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_evaluation_is_batch_norm_bit_for_bit_and_updates_nothing(norm, dtype):
    x, (weight, bias), tracked = draw(5, CHANNELS, 2, dtype=dtype), statistics(), torch.tensor(4)
    mean, var, weight, bias = (t.to(dtype) for t in (*statistics(), weight, bias))
    y = norm(x, mean, var, weight, bias, ghost=2, training=False, num_batches_tracked=tracked)
    assert y.equal(F.batch_norm(x, mean, var, weight, bias))
    assert [mean.tolist(), var.tolist(), int(tracked)] == [[1, 2, 3], [0.5] * 3, 4]


@BOTH
def test_evaluation_without_statistics_uses_the_whole_batch_as_pytorch_does(norm):
    x = draw(8, CHANNELS)
    assert norm(x, ghost=2, training=False).equal(F.batch_norm(x, None, None, training=True))


@BOTH
@pytest.mark.parametrize("training", [True, False])
def test_the_residual_is_added_before_the_activation(norm, training):
    x, residual = draw(8, CHANNELS, 2), draw(8, CHANNELS, 2, seed=1)
    plain = norm(x, *statistics(), ghost=4, training=training)
    fused = norm(x, *statistics(), ghost=4, training=training, activation="relu", residual=residual)
    assert_close(fused, (plain + residual).clamp(min=0))
    assert fused.count_nonzero() not in (0, fused.numel())


@BOTH
def test_bf16_inputs_are_summed_in_fp32(norm):
    x = (draw(512, CHANNELS, 8) + 100).bfloat16()  # bf16 has 8 bits: 100 and 100.25 are neighbours
    mean, var = statistics(torch.float32)
    y = norm(x, mean, var, ghost=256, momentum=1.0)
    means, variances = by_hand(x.double(), (256, 256))
    assert_close([mean, var], [means[1].float(), variances[1].float()], rtol=1e-5, atol=0)
    exact = torch.cat([F.batch_norm(p, None, None, training=True) for p in x.double().split(256)])
    assert y.dtype == torch.bfloat16
    assert_close(y, exact.bfloat16(), rtol=2**-7, atol=1e-5)  # the last rounding, nothing else
