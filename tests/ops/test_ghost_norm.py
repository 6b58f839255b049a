"""The fast ghost norm against its slow twin, on every path that it can take on a CPU."""

import copy
from math import prod

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import ghostbatch as gb
from ghostbatch.ops import (
    ghost_batch_norm,
    ghost_batch_norm_reference,
    ghost_sizes,
    paths,
    plain,
)
from ghostbatch.ops.buffers import Buffers
from ghostbatch.ops.running import _share

BOTH = pytest.mark.parametrize("norm", [ghost_batch_norm_reference, ghost_batch_norm])
NEVER = 1 << 40
PLAIN = {  # how much is worked on at a time, and whether PyTorch's kernels do the work
    "plain": (plain.WAVE, None),
    "one wave": (NEVER, False),
    "a wave holds a few ghosts": (64, False),
    "a ghost at a time": (1, False),
    "native": (plain.WAVE, True),
}


@pytest.fixture(params=["as shipped", "cut small", *PLAIN])
def path(request, monkeypatch):
    """Make small shapes take each path: the kernels, then those of the plain code."""
    if request.param == "cut small":
        request.getfixturevalue("cut_small")
    elif request.param in PLAIN:
        wave, by_pytorch = PLAIN[request.param]
        monkeypatch.setenv(paths.SWITCH, "0")
        monkeypatch.setattr(plain, "WAVE", wave)
        if by_pytorch is not None:
            monkeypatch.setattr(plain, "NATIVE_FORWARD", 1 if by_pytorch else NEVER)
            monkeypatch.setattr(plain, "NATIVE_BACKWARD", 1 if by_pytorch else NEVER)


def draw(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    """Values whose mean and deviation drift over the batch, so that ghosts differ."""
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    drift = torch.linspace(1, 2, shape[0], dtype=torch.float64).view(-1, *(1,) * (len(shape) - 1))
    return (values * drift + drift).to(dtype)


LAYOUTS = {
    "contiguous": lambda x: x.contiguous(),
    "channels innermost": lambda x: x.movedim(1, -1).contiguous().movedim(-1, 1),
    "transposed": lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),
    "every second sample": lambda x: x.repeat_interleave(2, 0)[::2],
    "every second pixel": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "half of the channels": lambda x: torch.cat([x, x], 1)[:, : x.shape[1]],
    "half of the innermost channels": lambda x: LAYOUTS["channels innermost"](torch.cat([x, x], 1))[
        :, : x.shape[1]
    ],
}
UPSTREAM = {**LAYOUTS, "expanded": lambda dy: dy[:1, :1].expand_as(dy)}  # as from y.mean(0)


@st.composite
def cases(draw):
    """Shapes, layouts and options."""
    ghost, samples = draw(st.integers(1, 6)), draw(st.integers(1, 17))
    inners = [(), (3,), (1,), (2, 3), (1, 1), (2, 1, 3)]
    smallest = min(ghost_sizes(samples, ghost))
    inner = draw(st.sampled_from([i for i in inners if smallest * prod(i) > 1] or [(3,)]))
    return {
        "shape": (samples, draw(st.sampled_from([1, 2, 3, 21])), *inner),
        "layout": draw(st.sampled_from(sorted(LAYOUTS))),
        "upstream": draw(st.sampled_from(sorted(UPSTREAM))),
        "weight": draw(st.sampled_from(["none", "fp32", "input's"])),
        "bias": draw(st.sampled_from(["none", "fp32", "input's"])),
        "options": {
            "ghost": ghost,
            "momentum": draw(st.sampled_from([0.1, None])),
            "running": draw(st.sampled_from(["sequential", "mean"])),
            # Bounds 1/std, with which rounding grows where a ghost's values happen to be close.
            "eps": 1e-2,
        },
    }


# The oracle is the twin in fp64 on the same, already rounded inputs, so what is left is the fast
# function's own rounding: that of the result, 2**-8 (bf16) or 2**-11 (fp16), and for all but fp64
# some 1e-6 of its fp32 sums, times 1/std <= 10 and sums of up to 100 terms.
TOLERANCE = {
    torch.float64: {"rtol": 1e-11, "atol": 1e-11},
    torch.float32: {"rtol": 2e-5, "atol": 2e-5},
    torch.float16: {"rtol": 2**-11, "atol": 1e-4},
    torch.bfloat16: {"rtol": 2**-8, "atol": 1e-4},
}


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(case=cases())
def test_results_gradients_and_statistics_equal_the_twins_and_keep_the_layout(dtype, case):
    shape, channels = case["shape"], case["shape"][1]
    kinds = {"none": None, "fp32": torch.promote_types(dtype, torch.float32), "input's": dtype}
    x = LAYOUTS[case["layout"]](draw(*shape, dtype=dtype))
    dy = UPSTREAM[case["upstream"]](draw(*shape, dtype=dtype, seed=1))
    parameters = [
        None if (kind := kinds[case[name]]) is None else draw(channels, dtype=kind, seed=seed)
        for name, seed in (("weight", 2), ("bias", 3))
    ]
    found = []
    for norm, convert in (
        (ghost_batch_norm, lambda t: t.detach()),
        (ghost_batch_norm_reference, lambda t: t.double().contiguous()),
    ):
        inputs = [None if t is None else convert(t).requires_grad_() for t in (x, *parameters)]
        leaves = [t for t in inputs if t is not None]
        kept = [t.to(kinds["fp32"]) for t in (draw(channels, seed=4), draw(channels, seed=5))]
        kept, tracked = [convert(t) for t in kept], torch.tensor(2)
        y = norm(inputs[0], *kept, *inputs[1:], num_batches_tracked=tracked, **case["options"])
        grads = torch.autograd.grad(y, leaves, convert(dy))
        found.append([y.detach(), *grads, *kept, tracked])
    fast, slow = found
    for result, exact in zip(fast, slow, strict=True):
        tolerance = TOLERANCE.get(result.dtype, TOLERANCE[torch.float64])
        assert_close(result, exact, **tolerance, check_dtype=False, check_stride=False)
    stride = torch.empty_like(x).stride()  # that of x, without its gaps
    assert [t.stride() for t in fast[:2]] == [stride, stride]
    assert [t.dtype for t in fast[:2]] == [dtype, dtype]
    assert [g.dtype for g in fast[2:-3]] == [p.dtype for p in parameters if p is not None]


@pytest.mark.parametrize("memory_format", [torch.channels_last, torch.channels_last_3d], ids=str)
def test_a_channels_last_input_gives_a_channels_last_output_and_gradient(memory_format):
    shape = (8, 3, 2, 4) if memory_format == torch.channels_last else (8, 3, 2, 2, 4)
    x = draw(*shape).to(memory_format=memory_format).requires_grad_()
    y = ghost_batch_norm(x, ghost=4)
    (dx,) = torch.autograd.grad(y.square().sum(), x)
    assert y.is_contiguous(memory_format=memory_format)
    assert dx.is_contiguous(memory_format=memory_format)


@pytest.mark.parametrize("layout", ["contiguous", "channels innermost", "transposed"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_results_are_rounded_once_even_where_the_bias_cancels(dtype, layout):
    x, bias = LAYOUTS[layout](draw(32, 2, 3, 3, dtype=dtype)), torch.tensor([-1.0, 1.0])
    y = ghost_batch_norm(x, None, None, None, bias, ghost=16)
    exact = ghost_batch_norm_reference(x.double(), None, None, None, bias.double(), ghost=16)
    assert_close(y.double(), exact, **TOLERANCE[dtype])


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("layout", ["contiguous", "channels innermost", "every second pixel"])
def test_first_and_second_derivatives_agree_with_finite_differences(layout):
    leaves = [LAYOUTS[layout](draw(5, 2, 2, 1)), draw(2, seed=1), draw(2, seed=2)]
    leaves = [leaf.requires_grad_() for leaf in leaves]

    def apply(x, weight, bias):  # two ghosts, of 2 and of 3 samples
        return ghost_batch_norm(x, None, None, weight, bias, ghost=2, eps=1e-2)

    assert torch.autograd.gradcheck(apply, leaves)
    assert torch.autograd.gradgradcheck(apply, leaves)


@BOTH
@pytest.mark.parametrize("tied", ["weight is made of the input", "weight and bias are one"])
def test_asking_for_second_derivatives_changes_no_first_derivative(norm, tied):
    found = []
    for create_graph in (False, True):
        x, scale = draw(8, 3, 2).requires_grad_(), draw(3, seed=1).requires_grad_()
        weight = x.mean((0, 2)) * scale if tied == "weight is made of the input" else scale
        y = norm(x, None, None, weight, weight, ghost=4)
        found.append(torch.autograd.grad(y.pow(3).sum(), (x, scale), create_graph=create_graph))
    assert_close(found[1], found[0])


# ------------------------------------------------------------------------------ numerical soundness


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("layout", ["contiguous", "channels innermost"])
@pytest.mark.parametrize("shape", [(256, 4, 4, 4), (256, 8, 32, 32)], ids=str)
def test_a_mean_of_1e4_leaves_three_digits_of_a_unit_variance(layout, shape):
    ghost = shape[0] // 2
    x, dy = draw(*shape, dtype=torch.float32, seed=1), draw(*shape, dtype=torch.float32, seed=2)
    x = LAYOUTS[layout]((x - x.mean()) / x.std() + 1e4).requires_grad_()
    mean, var = torch.zeros(2, shape[1])
    y = ghost_batch_norm(x, mean, var, ghost=ghost, momentum=1.0)
    (dx,) = torch.autograd.grad(y, x, dy)

    wide = x.detach().double().requires_grad_()
    exact = ghost_batch_norm_reference(wide, ghost=ghost)
    (exact_dx,) = torch.autograd.grad(exact, wide, dy.double())
    last = wide[ghost:].transpose(0, 1).flatten(1)
    assert_close(mean.double(), last.mean(1), rtol=1e-6, atol=0)
    assert_close(var.double(), last.var(1), rtol=5e-4, atol=0)
    assert_close(y.double(), exact, rtol=0, atol=1.1e-2)  # the mean, to 1e-6, is 1e-2 deviations
    assert_close(dx.double(), exact_dx, rtol=0, atol=1e-2 * float(exact_dx.abs().max()))


def test_a_naive_sum_of_squares_would_leave_no_digit():
    x = (torch.randn(2**14, generator=torch.Generator().manual_seed(0)) + 1e4).float()
    naive = x.square().mean() - x.mean().square()
    assert abs(naive - x.double().var()) > 0.5


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("layout", ["contiguous", "channels innermost"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_summed_in_fp32_both_ways(dtype, layout):
    # fp16 ends at 65504, which the sums and the squares all exceed; bf16 has three digits.
    x = LAYOUTS[layout](500 + 8 * draw(512, 2, 4, 4)).to(dtype)
    mean, var = torch.zeros(2, 2)
    leaves = [torch.ones(2, requires_grad=True), torch.zeros(2, requires_grad=True)]
    y = ghost_batch_norm(x, mean, var, *leaves, ghost=256, momentum=1.0)
    dweight, dbias = torch.autograd.grad(y, leaves, torch.full_like(y, 64))
    last = x[256:].double().transpose(0, 1).flatten(1)
    assert_close(mean.double(), last.mean(1), rtol=1e-6, atol=0)
    assert_close(var.double(), last.var(1), rtol=1e-5, atol=0)
    assert dbias.tolist() == [64 * 512 * 16] * 2
    assert_close(dweight, torch.zeros(2), rtol=0, atol=64 * 512 * 16 * 1e-5)


# ---------------------------------------------------------------- pieces of a batch, and re-running


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


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("micro", [4, 8, (12, 4, 8)], ids=str)
def test_micro_batches_that_the_ghost_divides_change_nothing(micro, momentum):
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


@pytest.mark.parametrize("layout", ["contiguous", "channels innermost", "every second pixel"])
@pytest.mark.parametrize("affine", [True, False])
def test_the_operators_keep_pytorchs_rules(layout, affine):
    x, ops = LAYOUTS[layout](draw(9, 3, 2, 2)), torch.ops.ghostbatch
    dy = draw(9, 3, 2, 2, seed=1)
    weight, bias = (draw(3, seed=2), draw(3, seed=3)) if affine else (None, None)
    _, table = ops.ghost_norm(x, weight, bias, 4, 1e-5)
    torch.library.opcheck(ops.ghost_norm_backward, (dy, x, weight, table, 4))
    for leaf in (x, weight, bias) if affine else (x,):
        leaf.requires_grad_()
    torch.library.opcheck(ops.ghost_norm, (x, weight, bias, 4, 1e-5))


@pytest.mark.parametrize("running", ["sequential", "mean"])
@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("tracked", [torch.tensor(3), None], ids=str)
def test_the_operator_of_running_statistics_keeps_pytorchs_rules(running, momentum, tracked):
    moved = (draw(3), draw(3), copy.copy(tracked))
    arguments = (*moved, draw(2, 4, 3), momentum, running, "local")
    torch.library.opcheck(torch.ops.ghostbatch.update_running, arguments)


# ----------------------------------------------------------------------------- fused, and bad input


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("activation", ["relu", None])
@pytest.mark.parametrize("with_residual", [True, False])
def test_fused_forms_equal_their_unfused_twins(training, activation, with_residual):
    found = []
    for fused in (True, False):
        x, residual = draw(9, 3, 2, 2).requires_grad_(), draw(9, 3, 2, 2, seed=1).requires_grad_()
        weight, bias = (draw(3, seed=s).requires_grad_() for s in (2, 3))
        kept = [draw(3, seed=4), draw(3, seed=5).square()]
        options = {"ghost": 4, "training": training}
        if fused:
            options |= {"activation": activation, "residual": residual if with_residual else None}
        y = ghost_batch_norm(x, *kept, weight, bias, **options)
        if not fused:
            y = y + residual if with_residual else y
            y = F.relu(y) if activation else y
        y.backward(draw(9, 3, 2, 2, seed=6))  # not 0 where ReLU lets nothing pass
        found.append([y.detach(), *(t.grad for t in (x, residual, weight, bias)), *kept])
    assert_close(found[0], found[1])


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("beside", ["contiguous", "channels innermost", "every second pixel"])
def test_a_residual_may_be_laid_out_in_another_way(layout, beside):
    found = []
    for fused in (True, False):
        x = LAYOUTS[layout](draw(9, 3, 2, 4)).requires_grad_()
        residual = LAYOUTS[beside](draw(9, 3, 2, 4, seed=1)).requires_grad_()
        if fused:
            y = ghost_batch_norm(x, ghost=4, activation="relu", residual=residual)
        else:
            y = F.relu(ghost_batch_norm(x, ghost=4) + residual)
        grads = torch.autograd.grad(y, (x, residual), draw(9, 3, 2, 4, seed=2))
        found.append([y.detach(), *grads])
    assert_close(found[0], found[1], check_stride=False)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("with_residual", [True, False])
def test_what_is_no_number_passes_relu_and_its_gradient(with_residual):
    found = []
    for fused in (True, False):
        x, residual = draw(8, 2, 3), draw(8, 2, 3, seed=1)
        if with_residual:
            residual[0, 0, 0] = torch.nan
        else:
            x[0, 0, 0], residual = torch.nan, None
        x.requires_grad_()
        if fused:
            y = ghost_batch_norm(x, ghost=4, activation="relu", residual=residual)
        else:
            y = F.relu(ghost_batch_norm(x, ghost=4) + (0 if residual is None else residual))
        found.append([y.detach(), *torch.autograd.grad(y, x, draw(8, 2, 3, seed=2))])
    assert found[1][0].isnan().any()
    assert_close(found[0], found[1], equal_nan=True)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("ghost", [0, -1, 4.0, True, "4", None])
def test_a_bad_ghost_is_refused_by_name_in_either_mode(ghost, training):
    with pytest.raises(ValueError, match=r"^ghost must be a positive integer, got"):
        ghost_batch_norm(draw(8, 3), draw(3), draw(3), ghost=ghost, training=training)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool, torch.complex64], ids=str)
def test_integer_and_complex_inputs_are_refused_by_name(dtype, training):
    with pytest.raises(TypeError, match=rf"^x must be .* floating-point .* got {dtype}"):
        ghost_batch_norm(torch.ones(8, 3, dtype=dtype), ghost=4, training=training)
    with pytest.raises(TypeError, match=rf"got {dtype}"):
        gb.GhostBatchNorm1d(3, 4).train(training)(torch.ones(8, 3, dtype=dtype))


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
def test_one_value_per_channel_is_refused_in_training_and_moves_nothing(shape, ghost):
    kept, tracked = [draw(3), draw(3)], torch.tensor(0)
    with pytest.raises(ValueError, match=r"Expected more than 1 value per channel when training"):
        ghost_batch_norm(draw(*shape), *kept, ghost=ghost, num_batches_tracked=tracked)
    assert_close([*kept, tracked], [draw(3), draw(3), torch.tensor(0)], rtol=0, atol=0)
    ghost_batch_norm(draw(*shape), *kept, ghost=ghost, training=False)


# ------------------------------------------------------------------------- large ghosts on a CPU


LARGE = (256, 128, 4, 4)  # two ghosts of 2^18 values: in plain code, PyTorch's kernels do the work


@pytest.fixture(params=["1", "0"], ids=["kernels", "plain"])
def shipped(request, monkeypatch):
    """The kernels, and the code for those who have none, with the limits that they have."""
    monkeypatch.setenv(paths.SWITCH, request.param)


@pytest.mark.usefixtures("shipped")
@pytest.mark.parametrize("kind", [torch.contiguous_format, torch.channels_last], ids=str)
def test_large_ghosts_as_shipped_equal_the_reference(kind):
    assert 128 * 128 * 16 >= plain.NATIVE_BACKWARD >= plain.NATIVE_FORWARD
    x, dy = (draw(*LARGE, seed=s).contiguous(memory_format=kind) for s in (0, 1))
    found = []
    for norm in (ghost_batch_norm, ghost_batch_norm_reference):
        leaf, weight, bias = (t.clone().requires_grad_() for t in (x, x[0, :, 0, 0], x[1, :, 0, 0]))
        kept = [x.new_full((128,), start) for start in (3.0, 2.0)]  # so that what was counts
        y = norm(leaf, *kept, weight, bias, ghost=128)
        found.append([y.detach(), *torch.autograd.grad(y, [leaf, weight, bias], dy), *kept])
    assert_close(found[0], found[1], rtol=1e-9, atol=1e-9)


@pytest.mark.usefixtures("shipped")
@pytest.mark.parametrize("kind", [torch.contiguous_format, torch.channels_last], ids=str)
def test_a_large_ghost_beyond_all_variance_has_no_gradient(kind):
    x = (draw(*LARGE, dtype=torch.float32) * 1e30).contiguous(memory_format=kind).requires_grad_()
    weight = torch.ones(128, requires_grad=True)
    y = ghost_batch_norm(x, None, None, weight, ghost=128)
    dx, dweight = torch.autograd.grad(y, [x, weight], torch.ones_like(y))
    assert dweight.abs().max() == 0
    assert dx.isfinite().all()


@pytest.mark.usefixtures("shipped")
def test_a_nan_in_one_channel_leaves_a_far_channel_sound():
    x = torch.randn(128, 4, 64, 64, generator=torch.Generator().manual_seed(0)) + 1e4
    x = x.contiguous(memory_format=torch.channels_last)
    x[0, 0, 0, 0] = torch.nan
    y = ghost_batch_norm(x, ghost=128)
    assert y[:, 1].std().item() == pytest.approx(1, rel=1e-2)
    assert y[:, 0].isnan().all()


def test_autocast_does_not_round_what_ranks_share():
    moments = draw(2, 6, 5, dtype=torch.float32) * 1000
    buffers = Buffers(torch.zeros(5), torch.ones(5), None, 0.1, "sequential")
    expected = _share(buffers, moments).sums
    with torch.autocast("cpu", torch.bfloat16):
        assert_close(_share(buffers, moments).sums, expected, rtol=0, atol=0)
