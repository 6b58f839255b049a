"""What ghost_batch_norm refuses, by name."""

import pytest
import torch
import torch.nn.functional as F
from norm_inputs import draw
from torch.testing import assert_close

import ghostbatch as gb
from ghostbatch.ops import ghost_batch_norm


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("ghost", [0, -1, 4.0, True, "4", None])
def test_a_bad_ghost_is_refused_by_name_in_either_mode(ghost, training):
    with pytest.raises(ValueError, match=r"^ghost: .* is not a positive integer; use 128"):
        ghost_batch_norm(draw(8, 3), draw(3), draw(3), ghost=ghost, training=training)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool, torch.complex64], ids=str)
def test_integer_and_complex_inputs_are_refused_by_name(dtype, training):
    with pytest.raises(TypeError, match=rf"^x must be .* floating-point .* got {dtype}"):
        ghost_batch_norm(torch.ones(8, 3, dtype=dtype), ghost=4, training=training)
    with pytest.raises(TypeError, match=rf"got {dtype}"):
        gb.GhostBatchNorm1d(3, 4).train(training)(torch.ones(8, 3, dtype=dtype))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("eps", [0.0, -0.0, -1e-5])
def test_an_eps_is_refused_where_batch_norm_refuses_it(eps, training):
    kept = [draw(3), draw(3).square()]
    try:
        expected = F.batch_norm(draw(8, 3), *kept, training=training, eps=eps)
    except ValueError:
        with pytest.raises(ValueError, match=r"batch_norm eps must be .* got"):
            ghost_batch_norm(draw(8, 3), *kept, ghost=8, training=training, eps=eps)
        with pytest.raises(ValueError, match=r"batch_norm eps must be .* got"):
            gb.GhostBatchNorm1d(3, 8, eps=eps).double().train(training)(draw(8, 3))
        assert_close(kept, [draw(3), draw(3).square()], rtol=0, atol=0)
    else:
        assert not training
        y = ghost_batch_norm(draw(8, 3), *kept, ghost=8, training=training, eps=eps)
        assert_close(y, expected, rtol=0, atol=0)


def test_a_vector_is_refused():
    with pytest.raises(ValueError, match=r"expected x of at least 2 dimensions .* got 1D input"):
        ghost_batch_norm(draw(8), ghost=4)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", ["running_mean", "running_var", "weight", "bias"])
@pytest.mark.parametrize("wrong", ["width", "device"])
def test_tensors_of_another_width_or_device_are_refused_by_name(name, wrong, training):
    tensors = {n: draw(3) for n in ("running_mean", "running_var", "weight", "bias")}
    tensors[name] = draw(4) if wrong == "width" else tensors[name].to("meta")
    message = {
        "width": rf"^{name} should contain 3 elements not 4$",
        "device": rf"^Expected all tensors to be on the same device.* x on cpu and {name} on meta$",
    }
    with pytest.raises(RuntimeError, match=message[wrong]):
        ghost_batch_norm(draw(8, 3), **tensors, ghost=4, training=training)


@pytest.mark.parametrize(("shape", "ghost"), [((1, 3), 4), ((1, 3, 1, 1), 4), ((9, 3), 1)])
def test_one_value_per_channel_is_refused_in_training_and_updates_nothing(shape, ghost):
    kept, tracked = [draw(3), draw(3)], torch.tensor(0)
    with pytest.raises(ValueError, match=r"Expected more than 1 value per channel when training"):
        ghost_batch_norm(draw(*shape), *kept, ghost=ghost, num_batches_tracked=tracked)
    assert_close([*kept, tracked], [draw(3), draw(3), torch.tensor(0)], rtol=0, atol=0)
    ghost_batch_norm(draw(*shape), *kept, ghost=ghost, training=False)


@pytest.mark.parametrize("option", ["running", "activation"])
def test_an_unknown_policy_or_activation_is_refused_by_name(option):
    with pytest.raises(ValueError, match=f"^{option}: 'unknown' is unknown; choose one of"):
        ghost_batch_norm(draw(8, 3), ghost=4, **{option: "unknown"})


def test_a_cumulative_average_needs_the_count():
    with pytest.raises(ValueError, match=r"^momentum: None .* num_batches_tracked; give"):
        ghost_batch_norm(draw(8, 3), draw(3), draw(3), ghost=4, momentum=None)
