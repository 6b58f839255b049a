"""Which backend a call gets, once; and what happens when a backend breaks."""

import subprocess
import sys
from functools import partial
from pathlib import Path

import norm_inputs
import pytest
import torch
from torch.testing import assert_close
from torch.testing._internal.two_tensor import TwoTensor

import ghostbatch as gb
from ghostbatch.ops import backend_name, ghost_batch_norm, ghost_batch_norm_reference
from ghostbatch.ops.backends import base, select
from ghostbatch.ops.backends.base import NormCall
from ghostbatch.ops.backends.triton import launch

draw = partial(norm_inputs.draw, dtype=torch.float32)
TRITON, C, TENSOR = select.BACKENDS


def selected(x, **options):
    return select.select(NormCall(x, None, None, 4, 1e-5, **options))


# ---------------------------------------------------------------------------------------- selection


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize(
    ("switch", "dtype", "backend"),
    [
        (None, torch.float32, C),
        ("1", torch.bfloat16, C),
        ("1", torch.float64, C),
        ("1", torch.float16, TENSOR),
        ("0", torch.float32, TENSOR),
        ("interpret", torch.float64, TENSOR),
    ],
    ids=["by default", "bf16", "fp64", "fp16", "switched off", "for the interpreter"],
)
def test_a_cpu_tensor_gets_the_c_kernels_for_their_dtypes_unless_switched_off(
    switch, dtype, backend, monkeypatch
):
    monkeypatch.delenv(select.SWITCH, raising=False)
    if switch is not None:
        monkeypatch.setenv(select.SWITCH, switch)
    x = draw(8, 3, dtype=dtype)
    assert selected(x) is backend
    assert select.has_kernels(x) == (backend is not TENSOR)
    assert backend_name(x.device, dtype) == {C: "c", TENSOR: "tensor"}[backend]


@pytest.mark.usefixtures("interpreted")
def test_the_interpreter_runs_the_triton_kernels_on_cpu_tensors():
    assert selected(draw(8, 3)) is TRITON
    assert backend_name(torch.device("cpu"), torch.float32) == "triton"


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("name", ["weight", "bias", "residual"])
def test_a_subclass_of_tensor_anywhere_gets_tensor_code(name):
    pair = TwoTensor(draw(3), draw(3)) if name != "residual" else TwoTensor(draw(8, 3), draw(8, 3))
    call = NormCall(draw(8, 3), None, None, 4, 1e-5)
    assert select.select(call) is C
    assert select.select(call._replace(**{name: pair})) is TENSOR


@pytest.mark.usefixtures("interpreted")
def test_offsets_beyond_32_bits_get_tensor_code():
    x = torch.empty(1, dtype=torch.bfloat16).expand(8, 2**30)
    assert selected(x) is TENSOR


@pytest.mark.parametrize("activation", ["relu", None])
def test_forward_and_backward_select_once(activation, monkeypatch):
    calls, once = [], select.select
    monkeypatch.setattr(
        "ghostbatch.ops.autograd.select", lambda call: (calls.append(call), once(call))[1]
    )
    layer = gb.GhostBatchNorm2d(4, ghost=3)
    layer(draw(6, 4, 2, 2).requires_grad_(), activation=activation).sum().backward()
    assert len(calls) == 1


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize(
    ("switch", "with_residual", "saves"),
    [("1", False, False), ("1", True, True), ("0", False, True), ("0", True, True)],
    ids=["kernels", "kernels, residual", "tensor code", "tensor code, residual"],
)
def test_the_result_is_saved_only_if_the_mask_cannot_be_recomputed(
    switch, with_residual, saves, monkeypatch
):
    monkeypatch.setenv(select.SWITCH, switch)
    residual = draw(8, 3, seed=1) if with_residual else None
    x = draw(8, 3).requires_grad_()
    y = ghost_batch_norm(x, ghost=4, activation="relu", residual=residual)
    saved = [t for t in y.grad_fn.saved_tensors if t is not None]
    assert any(t.data_ptr() == y.data_ptr() for t in saved) == saves


# ---------------------------------------------------------------------------------- broken backends


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("activation", ["relu", None])
def test_kernels_that_fail_are_given_up_with_one_warning(activation, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(launch, "_launch", fail)
    x = draw(8, 3, 2).requires_grad_()
    with pytest.warns(UserWarning, match="no compiler"):
        y = ghost_batch_norm(x, ghost=4, activation=activation)
    again = ghost_batch_norm(x, ghost=4, activation=activation)
    assert_close(y, ghost_batch_norm_reference(x, ghost=4, activation=activation))
    assert_close(y, again)


@pytest.mark.usefixtures("interpreted")
def test_kernels_that_fail_in_backward_leave_the_right_gradient(monkeypatch):
    x, dy = draw(9, 3, 2).requires_grad_(), draw(9, 3, 2, seed=1)
    bias = draw(3, seed=2)
    y = ghost_batch_norm(x, bias=bias, ghost=4, activation="relu")
    monkeypatch.setattr(launch, "_launch", lambda *_, **__: 1 / 0)
    with pytest.warns(UserWarning, match="division by zero"):
        (dx,) = torch.autograd.grad(y, x, dy)
    exact = ghost_batch_norm_reference(x, bias=bias, ghost=4, activation="relu")
    assert_close(dx, torch.autograd.grad(exact, x, dy)[0])


@pytest.mark.usefixtures("interpreted")
def test_a_lack_of_memory_is_not_blamed_on_the_kernels(monkeypatch):
    def fail(*_, **__):
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patch:
        patch.setattr(launch, "_launch", fail)
        with pytest.raises(torch.OutOfMemoryError):
            ghost_batch_norm(draw(8, 3, 2), ghost=4)
    assert selected(draw(8, 3, 2)) is TRITON


@pytest.mark.usefixtures("compiler")
def test_what_fails_in_every_backend_is_not_blamed_on_the_kernels(monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("not enough memory")

    with monkeypatch.context() as patch:
        patch.setattr(base, "make_dense", fail)
        with pytest.raises(RuntimeError, match="not enough memory"):
            ghost_batch_norm(draw(8, 3), ghost=4)
    assert selected(draw(8, 3)) is C


@pytest.mark.usefixtures("interpreted")
def test_a_broken_triton_is_given_up_with_one_warning_and_none_is_imported_before():
    script = Path(__file__).with_name("without_triton.py")
    done = subprocess.run([sys.executable, script], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# --------------------------------------------------------------------------------------- operators


@pytest.mark.usefixtures("interpreted")
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
