"""Ghost norm under autograd: micro-batches, checkpointing, and the operators for compilers."""

import copy

import pytest
import torch
import torch.nn.functional as F
from norm_inputs import LAYOUTS, draw
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import ghostbatch as gb
from ghostbatch.ops.backends import select
from ghostbatch.ops.running.stats import RunningStats
from ghostbatch.ops.running.update import contribution

# ------------------------------------------------------------------- micro-batches, and re-running


def network(ghost: int = 4, **options) -> nn.Sequential:
    torch.manual_seed(0)
    norms = [gb.GhostBatchNorm2d(3, ghost, **options), gb.GhostBatchNorm1d(5, ghost, **options)]
    model = nn.Sequential(
        nn.Conv2d(2, 3, 2), norms[0], nn.ReLU(), nn.Flatten(), nn.Linear(12, 5), norms[1], nn.Tanh()
    )
    return model.double()


def outcome(model: nn.Module, x: Tensor) -> dict[str, Tensor | None]:
    """All that a backward pass leaves behind."""
    grads = {f"{name}.grad": p.grad for name, p in model.named_parameters()}
    return {"x.grad": x.grad, **grads, **model.state_dict()}


@pytest.mark.parametrize("switch", ["1", "0"], ids=["C", "tensor code"])
@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("micro", [4, 8, (12, 4, 8)], ids=str)
def test_micro_batches_that_the_ghost_divides_change_nothing(micro, momentum, switch, monkeypatch):
    monkeypatch.setenv(select.SWITCH, switch)
    found = []
    for pieces in (24, micro):
        model, x = network(momentum=momentum), draw(24, 2, 3, 3).requires_grad_()
        outputs = [model(piece) for piece in x.split(pieces)]
        sum(y.pow(3).sum() for y in outputs).backward()
        found.append({"y": torch.cat(outputs).detach(), **outcome(model, x)})
    assert_close(found[1], found[0], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
@pytest.mark.parametrize("options", [{}, {"momentum": None}, {"running": "mean"}], ids=str)
def test_a_forward_that_checkpointing_runs_again_counts_once(reentrant, options):
    found = []
    for again in (False, True):
        model, x = network(**options), draw(9, 2, 3, 3).requires_grad_()
        for _ in range(2):
            y = checkpoint(model, x, use_reentrant=reentrant) if again else model(x)
            y.pow(3).sum().backward()
        found.append(outcome(model, x))
    assert int(found[0]["1.num_batches_tracked"]) == (2 if options.get("running") else 4)
    assert_close(found[1], found[0], rtol=0, atol=0)


def test_a_compiled_layer_that_checkpointing_runs_again_counts_once():
    if torch.cuda.is_available():
        torch.cuda.init()  # `checkpoint` refuses a forward that starts CUDA
    found = []
    for again in (False, True):
        model, x = network(), draw(9, 2, 3, 3).requires_grad_()
        called = torch.compile(model, backend="aot_eager") if again else model
        for _ in range(2):
            y = checkpoint(called, x, use_reentrant=False) if again else called(x)
            y.pow(3).sum().backward()
        found.append(outcome(model, x))
    assert_close(found[1], found[0])


# -------------------------------------------------------------------------------------- operators


@pytest.mark.parametrize(
    "layout", ["contiguous", "channels innermost", "every second pixel", "transposed"]
)
@pytest.mark.parametrize(
    ("affine", "activation", "with_residual"),
    [(False, None, False), (True, "relu", False), (True, "relu", True)],
)
def test_the_operators_keep_pytorchs_rules(layout, affine, activation, with_residual):
    x, ops = LAYOUTS[layout](draw(9, 3, 2, 2)), torch.ops.ghostbatch
    dy = draw(9, 3, 2, 2, seed=1)
    weight, bias = (draw(3, seed=2), draw(3, seed=3)) if affine else (None, None)
    residual = draw(9, 3, 2, 2, seed=4) if with_residual else None
    forward = (x, weight, bias, 4, 1e-5, activation, residual)
    y, table = ops.ghost_norm(*forward)
    backward = (dy, x, weight, table, 4, activation, bias, y if with_residual else None)
    torch.library.opcheck(ops.ghost_norm_backward, backward)
    for leaf in (x, weight, bias) if affine else (x,):
        leaf.requires_grad_()
    torch.library.opcheck(ops.ghost_norm, forward)


@pytest.mark.parametrize("running", ["sequential", "mean"])
@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("tracked", [torch.tensor(3), None], ids=str)
def test_the_operator_of_running_statistics_keeps_pytorchs_rules(running, momentum, tracked):
    buffers = (draw(3), draw(3), copy.copy(tracked))
    arguments = (*buffers, draw(2, 4, 3), momentum, running, "local")
    torch.library.opcheck(torch.ops.ghostbatch.update_running, arguments)


def test_autocast_does_not_round_the_contributions_of_ranks():
    moments = draw(2, 6, 5, dtype=torch.float32) * 1000
    stats = RunningStats(torch.zeros(5), torch.ones(5), None, 0.1, "sequential")
    expected = contribution(stats, moments).sums
    with torch.autocast("cpu", torch.bfloat16):
        assert_close(contribution(stats, moments).sums, expected, rtol=0, atol=0)


def test_forward_mode_gives_the_directional_derivative_and_leaves_no_tangent_behind():
    torch.manual_seed(0)
    x, step = torch.randn(2, 9, 3, dtype=torch.float64)
    layer, twin = (gb.GhostBatchNorm1d(3, 4, dtype=torch.float64) for _ in range(2))
    with forward_ad.dual_level():
        both = forward_ad.make_dual(x, step)
        y = layer(both)
        plain = torch.cat([F.batch_norm(g, None, None, training=True) for g in both.split([4, 5])])
        for found, expected in zip(*map(forward_ad.unpack_dual, (y, plain)), strict=True):
            assert_close(found, expected)
        assert forward_ad.unpack_dual(layer.running_mean).tangent is None
    twin(x)
    assert_close(layer.state_dict(), twin.state_dict())
