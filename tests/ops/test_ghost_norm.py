"""Ghost norm against the reference, in every backend that runs on a CPU."""

from math import prod

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from norm_inputs import LAYOUTS, draw
from torch.testing import assert_close

from ghostbatch.ops import ghost_batch_norm, ghost_batch_norm_reference, ghost_sizes

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


# The oracle is the reference in fp64 on the same, already rounded inputs, so the difference is the
# backend's own rounding: that of the result, 2**-8 (bf16) or 2**-11 (fp16), and for all but fp64
# some 1e-6 of its fp32 sums, times 1/std <= 10 and sums of up to 100 terms.
TOLERANCE = {
    torch.float64: {"rtol": 1e-11, "atol": 1e-11},
    torch.float32: {"rtol": 2e-5, "atol": 2e-5},
    torch.float16: {"rtol": 2**-11, "atol": 1e-4},
    torch.bfloat16: {"rtol": 2**-8, "atol": 1e-4},
}


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(case=cases())
def test_results_gradients_and_statistics_equal_the_references_and_keep_the_layout(dtype, case):
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


@pytest.mark.parametrize("layout", ["contiguous", "channels innermost", "transposed"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_results_are_rounded_once_even_where_the_bias_cancels(dtype, layout):
    x, bias = LAYOUTS[layout](draw(32, 2, 3, 3, dtype=dtype)), torch.tensor([-1.0, 1.0])
    y = ghost_batch_norm(x, None, None, None, bias, ghost=16)
    exact = ghost_batch_norm_reference(x.double(), None, None, None, bias.double(), ghost=16)
    assert_close(y.double(), exact, **TOLERANCE[dtype])


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("layout", ["contiguous", "channels innermost", "every second pixel"])
def test_first_and_second_derivatives_agree_with_finite_differences(layout):
    leaves = [LAYOUTS[layout](draw(5, 2, 2, 1)), draw(2, seed=1), draw(2, seed=2)]
    leaves = [leaf.requires_grad_() for leaf in leaves]

    def apply(x, weight, bias):  # two ghosts, of 2 and of 3 samples
        return ghost_batch_norm(x, None, None, weight, bias, ghost=2, eps=1e-2)

    assert torch.autograd.gradcheck(apply, leaves)
    assert torch.autograd.gradgradcheck(apply, leaves)


@pytest.mark.parametrize("norm", [ghost_batch_norm_reference, ghost_batch_norm])
@pytest.mark.parametrize("tied", ["weight is made of the input", "weight and bias are one"])
def test_asking_for_second_derivatives_changes_no_first_derivative(norm, tied):
    found = []
    for create_graph in (False, True):
        x, scale = draw(8, 3, 2).requires_grad_(), draw(3, seed=1).requires_grad_()
        weight = x.mean((0, 2)) * scale if tied == "weight is made of the input" else scale
        y = norm(x, None, None, weight, weight, ghost=4)
        found.append(torch.autograd.grad(y.pow(3).sum(), (x, scale), create_graph=create_graph))
    assert_close(found[1], found[0])


# ----------------------------------------------------------------------- residual and activation


@pytest.mark.usefixtures("backend")
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


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("beside", ["contiguous", "channels innermost", "every second pixel"])
def test_a_residual_may_have_another_layout(layout, beside):
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


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("with_residual", [True, False])
def test_a_nan_passes_relu_and_its_gradient(with_residual):
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
