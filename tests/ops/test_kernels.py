"""The Triton kernels, in Triton's interpreter, against the slow twin; and when they are used.

The interpreter runs programs one after the other, so nothing here ever waits for another program.
"""

import copy
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import ghostbatch as gb
from ghostbatch.ops import ghost_batch_norm, ghost_batch_norm_reference, ghost_sizes, paths, plain

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("with a GPU the kernels are no longer interpreted", allow_module_level=True)

from ghostbatch.ops import fused
from ghostbatch.ops.buffers import Buffers
from ghostbatch.ops.running import _apply, _share

SMALL = fused.Tuning(warps=1, vectors=2, subtiles=2, channels=16, programs=2)
TOLERANCE = {
    torch.float32: {"rtol": 2e-5, "atol": 2e-5},
    torch.float16: {"rtol": 2**-10, "atol": 2e-4},
    torch.bfloat16: {"rtol": 2**-7, "atol": 2e-4},  # the interpreter rounds to within one ulp
}
LAYOUTS = {
    "contiguous": lambda x: x.contiguous(),
    "channels innermost": lambda x: x.movedim(1, -1).contiguous().movedim(-1, 1),
    "every second sample": lambda x: x.repeat_interleave(2, 0)[::2],
    "transposed": lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),
}


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch):
    """Kernels for CPU tensors, with small tiles; it is an error if they are given up."""
    monkeypatch.setenv("GHOSTBATCH_KERNELS", "interpret")
    monkeypatch.setattr(paths, "_broken", [])
    monkeypatch.setattr(fused, "tuning", lambda *_: SMALL)


@pytest.fixture
def launches(monkeypatch):
    """Count the launches of kernels."""
    seen, launch = [], fused._launch

    def counted(kernel, *arguments, **constants):
        seen.append(kernel)
        launch(kernel, *arguments, **constants)

    monkeypatch.setattr(fused, "_launch", counted)
    return seen


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Values whose mean and deviation drift over the batch, so that ghosts differ."""
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    drift = torch.linspace(1, 2, shape[0], dtype=torch.float64).view(-1, *(1,) * (len(shape) - 1))
    return (values * drift + drift / 2).to(dtype)


def outcome(norm, x, dy, weight, bias, residual, wide: bool, **options) -> list[Tensor]:
    """The result, all gradients and the running statistics."""
    tensors = [x, weight, bias, residual]
    if wide:
        dy, *tensors = (None if t is None else t.double() for t in (dy, *tensors))
    tensors = [None if t is None else t.detach().requires_grad_() for t in tensors]
    x, weight, bias, residual = tensors
    kept = [torch.zeros(x.shape[1]), torch.ones(x.shape[1])]
    y = norm(x, *kept, weight, bias, residual=residual, eps=1e-2, **options)
    grads = torch.autograd.grad(y, [t for t in tensors if t is not None], dy)
    return [y.detach(), *grads, *kept]


def check(shape, ghost, dtype, layout, *, affine=True, residual=False, activation=None):
    x = LAYOUTS[layout](draw(*shape, dtype=dtype))
    dy = LAYOUTS[layout](draw(*shape, dtype=dtype, seed=1))
    weight, bias = (draw(shape[1], seed=2), draw(shape[1], seed=3)) if affine else (None, None)
    added = LAYOUTS[layout](draw(*shape, dtype=dtype, seed=4)) if residual else None
    options = {"ghost": ghost, "activation": activation}
    if (
        activation
    ):  # near its bend rounding decides what ReLU lets pass: no gradient comes from there
        exact = ghost_batch_norm_reference(
            *(x.double(), None, None), *(p if p is None else p.double() for p in (weight, bias)),
            ghost=ghost, eps=1e-2, residual=None if added is None else added.double(),
        )  # fmt: skip
        dy = torch.where(exact.abs() > 1e-4, dy, 0)
    fast = outcome(ghost_batch_norm, x, dy, weight, bias, added, False, **options)
    slow = outcome(ghost_batch_norm_reference, x, dy, weight, bias, added, True, **options)
    for result, right in zip(fast, slow, strict=True):
        tolerance = TOLERANCE[result.dtype]
        assert_close(result, right, **tolerance, check_dtype=False, check_stride=False)
    assert fast[0].dtype == fast[1].dtype == dtype
    assert fast[0].stride() == fast[1].stride() == torch.empty_like(x).stride()


# ----------------------------------------------------------------------------- the same as the twin


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "channels innermost"])
@pytest.mark.parametrize(
    ("shape", "ghost"),
    [
        ((8, 16, 4, 4), 4),  # tiles that fill exactly
        ((9, 3, 5), 4),  # a larger last ghost, and sizes that no tile divides
        ((7, 5, 3, 3), 4),  # a smaller last ghost
        ((5, 2, 2, 2), 8),  # a batch smaller than a ghost
        ((12, 40, 2), 6),  # more channels than a block
    ],
    ids=str,
)
def test_results_gradients_and_statistics_equal_the_twins(shape, ghost, layout, dtype, launches):
    check(shape, ghost, dtype, layout)
    assert len(launches) >= 2


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", [(13, 20), (16, 48), (6, 3)], ids=str)
def test_matrices_are_normalised_too(shape, dtype):
    check(shape, 6, dtype, "contiguous")


@pytest.mark.parametrize("layout", ["every second sample", "transposed"])
def test_other_layouts_are_copied_first_and_kept(layout):
    check((9, 3, 2, 4), 4, torch.float32, layout, activation="relu", residual=True)


@pytest.mark.parametrize("layout", ["contiguous", "channels innermost"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("affine", [True, False], ids=["affine", "not affine"])
@pytest.mark.parametrize(
    "fused_with",
    [{"activation": "relu"}, {"residual": True}, {"activation": "relu", "residual": True}, {}],
    ids=str,
)
def test_fused_forms_equal_the_twins(fused_with, affine, dtype, layout):
    check((9, 4, 3, 3), 4, dtype, layout, affine=affine, **fused_with)


@pytest.mark.parametrize(
    "settings",
    [
        replace(SMALL, programs=0, lookahead=0),
        replace(SMALL, programs=1, lookahead=3),
        replace(SMALL, vectors=1, subtiles=1, fan=2),  # sums are added up in two steps
        replace(SMALL, warps=2, vectors=1, subtiles=1, channels=1, stream=0),
        replace(SMALL, vectors=8, subtiles=8, channels=4, stream=2),
        fused.Tuning(),
    ],
    ids=str,
)
@pytest.mark.parametrize("layout", ["contiguous", "channels innermost"])
def test_settings_change_no_result(settings, layout, monkeypatch):
    monkeypatch.setattr(fused, "tuning", lambda *_: settings)
    check((10, 6, 4, 4), 4, torch.float32, layout, activation="relu")


@pytest.mark.parametrize("layout", ["contiguous", "channels innermost"])
def test_a_mean_of_1e4_leaves_three_digits_of_a_unit_variance(layout):
    x = draw(64, 4, 4, 4)
    x = LAYOUTS[layout]((x - x.mean()) / x.std() + 1e4)
    y, table = fused.forward(x, None, None, 32, 1e-5)
    exact, right = plain.forward(x.double(), None, None, 32, 1e-5)
    assert_close(table[0].double(), right[0], rtol=1e-6, atol=0)
    assert_close(table[2].double(), right[2], rtol=5e-4, atol=0)
    assert_close(y.double(), exact, rtol=0, atol=1.1e-2)


def test_the_same_input_gives_the_same_bits():
    x, dy = draw(12, 5, 4, 4), draw(12, 5, 4, 4, seed=1)
    runs = []
    for _ in range(2):
        y, table = fused.forward(x, None, None, 4, 1e-5, "relu")
        runs.append([y, table, *fused.backward(dy, x, None, table, 4, "relu")])
    assert_close(runs[0], runs[1], rtol=0, atol=0)


@pytest.mark.parametrize("momentum", [0.1, 0.0, 1.0, None])
@pytest.mark.parametrize("running", ["sequential", "mean"])
@pytest.mark.parametrize("tracked", [torch.tensor(3), None], ids=str)
def test_running_statistics_move_as_the_twins(momentum, running, tracked):
    if momentum is None and tracked is None:
        pytest.skip("refused")
    x, found = draw(21, 40), []
    for norm in (ghost_batch_norm, ghost_batch_norm_reference):
        kept = [draw(40, seed=1), draw(40, seed=2).square(), copy.deepcopy(tracked)]
        versions = [t._version for t in kept[:2]]
        options = {"momentum": momentum, "running": running, "num_batches_tracked": kept[2]}
        norm(x, *kept[:2], ghost=3, **options)
        found.append([t for t in kept if t is not None])
        assert [t._version > v for t, v in zip(kept[:2], versions, strict=True)] == [True, True]
    assert_close(found[0], found[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("with_residual", [True, False])
def test_second_derivatives_are_those_of_the_twin(with_residual):
    found = []
    for norm in (ghost_batch_norm, ghost_batch_norm_reference):
        x, residual = (draw(6, 2, 2, 2, seed=s).requires_grad_() for s in (0, 1))
        y = norm(x, ghost=3, activation="relu", residual=residual if with_residual else None)
        leaves = [x, residual] if with_residual else [x]
        grads = torch.autograd.grad(y.pow(3).sum(), leaves, create_graph=True)
        found.append([*grads, *torch.autograd.grad(sum(g.pow(2).sum() for g in grads), leaves)])
    assert_close(found[0], found[1], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("programs", [0, 2])
def test_counters_can_be_used_again_by_the_same_kernel(programs, monkeypatch):
    """As the kernels of a CUDA graph do, whose counters are cleared only once."""
    settings = replace(SMALL, vectors=1, subtiles=1, fan=2, programs=programs)  # in two steps
    monkeypatch.setattr(fused, "tuning", lambda *_: settings)
    kept, calls = {}, []

    def same_each_round(device, count):
        calls.append(count)
        return kept.setdefault(len(calls) % 2, torch.zeros(count, dtype=torch.int64, device=device))

    monkeypatch.setattr(fused, "counters", same_each_round)
    x, dy = draw(11, 5, 3, 3), draw(11, 5, 3, 3, seed=1)
    weight, bias = torch.rand(5), torch.rand(5)
    rounds = [
        outcome(ghost_batch_norm, x, dy, weight, bias, None, wide=False, ghost=4) for _ in range(4)
    ]
    assert len(calls) == 8
    assert all(int(counter[0]) > 0 for counter in kept.values())
    for again in rounds[1:]:
        assert_close(again, rounds[0], rtol=0, atol=0)


@pytest.mark.parametrize("running", ["sequential", "mean"])
@pytest.mark.parametrize("momentum", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("shape", [(2, 1, 3), (2, 70, 33)], ids=str)
def test_running_statistics_moved_alone_are_those_moved_in_the_forward(running, momentum, shape):
    """Compiled code has an operator for them, and a kernel of their own."""
    moments = draw(*shape)
    found = []
    for move in (paths.move_running, lambda b, m: _apply(b, [_share(b, m)])):
        buffers = Buffers(
            torch.full((shape[2],), 3.0),
            torch.ones(shape[2]),
            torch.tensor(5),
            momentum,
            running,
        )
        assert move(buffers, moments) in (True, None)
        found.append([buffers.mean, buffers.var, buffers.tracked])
    assert_close(found[0], found[1])


def test_a_training_step_is_two_kernels_and_moves_the_running_statistics(launches):
    layer = gb.GhostBatchNorm2d(4, ghost=3)
    layer(draw(6, 4, 2, 2).requires_grad_()).sum().backward()
    assert [kernel.__name__ for kernel in launches] == ["forward_kernel", "backward_kernel"]
    assert int(layer.num_batches_tracked) == 2
    assert layer.running_mean.abs().min() > 0


# -------------------------------------------------------------------------------- how tiles are cut


@pytest.mark.parametrize("samples", [5, 16, 100, 112, 4096])
@pytest.mark.parametrize("shape", [(16, 32, 32), (64, 7, 7), (512,), (3, 5), (96, 8, 8)], ids=str)
@pytest.mark.parametrize("planes", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_plan_covers_the_batch_and_looks_back_at_least_a_group(samples, shape, planes, dtype):
    cut = fused.plan((samples, *shape), dtype, planes, 32, fused.Tuning(), 132)
    sizes, (BC, U, R, SUB) = (
        ghost_sizes(samples, 32),
        (cut.constants[k] for k in "BC U R SUB".split()),
    )
    pixels = cut.ghost_rows // sizes[0]
    assert cut.blocks * BC >= shape[0] > (cut.blocks - 1) * BC
    for rows, tiles in ((cut.ghost_rows, cut.tiles), (cut.last_rows, cut.last_tiles)):
        assert tiles * SUB * U * R >= rows > (tiles - 1) * SUB * U * R
    assert cut.last_rows == sizes[-1] * pixels
    assert cut.delay >= max(cut.tiles, cut.last_tiles)
    assert cut.grid >= 1


# ------------------------------------------------------------------------------- when they are used


@pytest.mark.parametrize("switch", ["0", "1", None])
def test_a_cpu_tensor_takes_the_plain_path_unless_asked(switch, launches, monkeypatch):
    monkeypatch.delenv("GHOSTBATCH_KERNELS")
    if switch is not None:
        monkeypatch.setenv("GHOSTBATCH_KERNELS", switch)
    ghost_batch_norm(draw(8, 3, 2), ghost=4, activation="relu")
    assert not launches


def test_dtypes_that_are_not_served_take_the_plain_path_without_a_word(launches):
    ghost_batch_norm(draw(8, 3, 2, dtype=torch.float64), ghost=4)
    assert not launches


@pytest.mark.parametrize("activation", ["relu", None])
def test_kernels_that_fail_are_given_up_with_one_warning(activation, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(fused, "_launch", fail)
    x = draw(8, 3, 2).requires_grad_()
    with pytest.warns(UserWarning, match="no compiler"):
        y = ghost_batch_norm(x, ghost=4, activation=activation)
    again = ghost_batch_norm(x, ghost=4, activation=activation)
    assert_close(y, ghost_batch_norm_reference(x, ghost=4, activation=activation))
    assert_close(y, again)


def test_kernels_that_fail_in_backward_leave_the_right_gradient(monkeypatch):
    x, dy = draw(9, 3, 2).requires_grad_(), draw(9, 3, 2, seed=1)
    bias = draw(3, seed=2)
    y = ghost_batch_norm(x, bias=bias, ghost=4, activation="relu")
    monkeypatch.setattr(fused, "_launch", lambda *_, **__: 1 / 0)
    with pytest.warns(UserWarning, match="division by zero"):
        (dx,) = torch.autograd.grad(y, x, dy)
    exact = ghost_batch_norm_reference(x, bias=bias, ghost=4, activation="relu")
    assert_close(dx, torch.autograd.grad(exact, x, dy)[0])


def test_a_broken_triton_is_given_up_with_one_warning_and_none_is_imported_before():
    code = """if True:
        import sys, warnings, torch
        sys.modules["triton"] = None  # importing it now fails
        from ghostbatch.ops import ghost_batch_norm
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            for _ in range(2):
                ghost_batch_norm(torch.randn(8, 3), ghost=4)
        assert len(seen) == 1 and "plain code" in str(seen[0].message), seen
    """
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_compiled_code_uses_the_kernels(launches):
    @torch.compile(backend="aot_eager", fullgraph=True)
    def apply(x, weight, residual):
        options = {"ghost": 4, "activation": "relu", "residual": residual}
        return ghost_batch_norm(x, None, None, weight, **options).square()

    leaves = [draw(8, 3, 2).requires_grad_(), draw(3).requires_grad_(), draw(8, 3, 2, seed=1)]
    found = torch.autograd.grad(apply(*leaves).sum(), leaves[:2])
    assert len(launches) == 2
    x, weight, residual = leaves
    options = {"ghost": 4, "activation": "relu", "residual": residual}
    exact = ghost_batch_norm_reference(x, None, None, weight, **options).square()
    assert_close(found, torch.autograd.grad(exact.sum(), leaves[:2]), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("with_residual", [True, False])
def test_the_operators_keep_pytorchs_rules(layout, with_residual):
    x, dy = LAYOUTS[layout](draw(9, 3, 2, 2)), draw(9, 3, 2, 2, seed=1)
    weight, bias = draw(3, seed=2), draw(3, seed=3)
    residual = draw(9, 3, 2, 2, seed=4) if with_residual else None
    ops = torch.ops.ghostbatch
    y, table = ops.ghost_norm(x, weight, bias, 4, 1e-5, "relu", residual)
    arguments = (dy, x, weight, table, 4, "relu", bias, y if with_residual else None)
    torch.library.opcheck(ops.ghost_norm_backward, arguments)
    for leaf in (x, weight, bias):
        leaf.requires_grad_()
    torch.library.opcheck(ops.ghost_norm, (x, weight, bias, 4, 1e-5, "relu", residual))
