"""The CPU kernels as shipped, and how they come to be. See test_ghost_norm for the properties."""

import os
import stat
import subprocess
import sys
import warnings

import pytest
import torch
from torch.testing import assert_close
from torch.testing._internal.two_tensor import TwoTensor

from ghostbatch.ops import (
    cpu,
    cpu_build,
    ghost_batch_norm,
    ghost_batch_norm_reference,
    ghost_sizes,
    paths,
    plain,
)

pytestmark = pytest.mark.usefixtures("compiler")
KINDS = [torch.contiguous_format, torch.channels_last]


def draw(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> torch.Tensor:
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return values.to(dtype)


# ---------------------------------------------------------------------------------------- results


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize(
    ("shape", "ghost"),
    [
        ((70, 33, 16, 16), 16),  # small ghosts: whole ones, and some left over
        ((70, 65, 17, 15), 32),  # large ones, worked on by all threads
        ((5, 3, 64, 300), 8),  # one ghost; planes longer than a chain of additions
        ((200, 1, 2, 3), 64),
    ],
    ids=str,
)
def test_batches_of_real_size_equal_the_reference_for_any_threads(shape, ghost, kind, threads):
    torch.set_num_threads(threads)
    x, dy = (draw(*shape, seed=s).contiguous(memory_format=kind) for s in (0, 1))
    weight, bias = draw(shape[1], seed=2), draw(shape[1], seed=3)
    found = []
    for norm in (ghost_batch_norm, ghost_batch_norm_reference):
        leaves = [t.clone().requires_grad_() for t in (x, weight, bias)]
        kept, tracked = [draw(shape[1], seed=4), draw(shape[1], seed=5)], torch.tensor(7)
        y = norm(leaves[0], *kept, *leaves[1:], ghost=ghost, num_batches_tracked=tracked)
        found.append([y.detach(), *torch.autograd.grad(y, leaves, dy), *kept, tracked])
    assert_close(found[0], found[1], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_the_same_call_gives_the_same_bits(kind):
    torch.set_num_threads(3)
    x = draw(130, 40, 9, 9, dtype=torch.float32).contiguous(memory_format=kind)
    found = [cpu.forward(x, None, None, 32, 1e-5) for _ in range(5)]
    for y, table in found[1:]:
        assert torch.equal(y, found[0][0])
        assert torch.equal(table, found[0][1])
    table = found[0][1]
    gradients = [cpu.backward(x.square(), x, None, table, 32)[:2] for _ in range(5)]
    assert all(
        torch.equal(a, b) for g in gradients[1:] for a, b in zip(g, gradients[0], strict=True)
    )


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_first_values_far_from_the_others_leave_the_variance_sound(kind):
    """Squares are taken about the mean of the first few."""
    x = draw(128, 4, 16, 16, dtype=torch.float32)
    x[:4] += 1e6
    x = x.contiguous(memory_format=kind)
    _, table = cpu.forward(x, None, None, 128, 1e-5)
    exact = x.double().transpose(0, 1).flatten(1).var(1)
    assert_close(table[2, 0].double(), exact, rtol=1e-4, atol=0)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_an_infinite_or_missing_number_stays_in_its_channel(kind):
    x = draw(64, 3, 4, 4, dtype=torch.float32).contiguous(memory_format=kind)
    x[0, 0, 0, 0], x[9, 1, 0, 0] = torch.inf, torch.nan
    y = ghost_batch_norm(x, ghost=32)
    exact = ghost_batch_norm_reference(x.double(), ghost=32)
    assert_close(y.double(), exact, rtol=1e-5, atol=1e-5, equal_nan=True)
    mean, var = torch.zeros(3), torch.ones(3)
    ghost_batch_norm(x[:32], mean, var, ghost=32, momentum=1.0)
    assert mean[0] == torch.inf
    assert var[:2].isnan().all()
    assert mean[2].isfinite()


def test_bfloat16_rounds_to_nearest_even_and_keeps_what_is_no_number():
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    x = bits.view(torch.bfloat16)  # every number there is
    x = torch.stack([x, x.flip(0)], 1)[:, :, None]
    weight = torch.tensor([1.7, -0.3])
    # One ghost of two samples: y = +-weight, or NaN; the residual makes it anything.
    pairs = x.unfold(0, 2, 2).movedim(-1, 1).flatten(0, 1)
    y, _ = cpu.forward(torch.ones_like(pairs), weight, None, 2, 1e-5, None, pairs)
    assert torch.equal(y.isnan(), pairs.isnan())
    assert_close(y, pairs, rtol=0, atol=0, equal_nan=True)  # of ones, nothing is left but residual
    odd, even = 1 + 2**-8, 1 + 3 * 2**-8  # between two numbers
    bias = torch.tensor([odd, even])
    y, _ = cpu.forward(torch.ones(4, 2, dtype=torch.bfloat16), None, bias, 4, 1e-5)
    assert y[0].tolist() == [1.0, 1 + 2**-6]


def test_bfloat16_keeps_a_nan_whose_bits_would_round_to_a_number():
    bias = torch.tensor([0x7FFFFFFF], dtype=torch.int32).view(torch.float32)
    y, _ = cpu.forward(torch.ones(4, 1, dtype=torch.bfloat16), None, bias, 4, 1e-5)
    assert y.isnan().all()


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_constant_channel_has_no_negative_variance(kind):
    constants = torch.linspace(0.1, 1e4, 500).view(1, 500, 1, 1)
    x = constants.expand(7 * 128, 500, 1, 3).contiguous(memory_format=kind)
    y, table = cpu.forward(x, None, None, 7 * 128, 1e-30)
    assert (table[2] >= 0).all()
    assert y.isfinite().all()


def test_where_the_variance_is_beyond_all_numbers_so_may_be_a_product():
    x = draw(64, 3, dtype=torch.float32) * 1e30
    _, table = cpu.forward(x, None, None, 64, 1e-5)
    dx, (dweight, _), _ = cpu.backward(torch.full_like(x, 1e15), x, None, table, 64)
    assert table[1].abs().max() == 0
    assert dweight.abs().max() == 0
    assert dx.abs().max() == 0


def test_autograd_knows_that_running_statistics_have_moved():
    """So that it refuses to differentiate what was computed from them before."""
    mean, var, tracked = draw(3), draw(3).square(), torch.tensor(0)
    before = [t._version for t in (mean, var, tracked)]
    ghost_batch_norm(draw(8, 3), mean, var, ghost=4, num_batches_tracked=tracked)
    assert [t._version for t in (mean, var, tracked)] == [version + 1 for version in before]


@pytest.mark.parametrize("odd", ["parameters", "statistics", "count"])
def test_tensors_that_no_kernel_can_take_as_they_are_give_the_same(odd):
    x, dy = draw(40, 3, 2), draw(40, 3, 2, seed=1)
    found = []
    for norm in (ghost_batch_norm, ghost_batch_norm_reference):
        mean, var, weight, bias = (
            draw(6, seed=seed)[::2] if of == odd else draw(3, seed=seed)  # with gaps
            for seed, of in enumerate(("statistics", "statistics", "parameters", "parameters"))
        )
        leaves = [t.requires_grad_() for t in (x.clone(), weight, bias)]
        counts = torch.tensor([-3, 7], dtype=torch.int32 if odd == "count" else torch.long)
        y = norm(leaves[0], mean, var, *leaves[1:], ghost=8, num_batches_tracked=counts[0])
        found.append([y, *torch.autograd.grad(y, leaves, dy), mean, var, counts])
    assert_close(found[0], found[1])


def test_what_does_not_lie_in_memory_as_it_reads_is_left_to_plain_code():
    x = draw(8, 3, 2)
    negated = torch.complex(draw(8, 3, 2, seed=1), -x).conj().imag
    assert negated.is_neg()
    expected = ghost_batch_norm_reference(x, ghost=4)
    assert_close(ghost_batch_norm(negated, ghost=4), expected)
    leaf = x.clone().requires_grad_()
    (zero,) = torch.autograd.grad(
        ghost_batch_norm(leaf, ghost=4), leaf, torch._efficientzerotensor(x.shape, dtype=x.dtype)
    )
    assert zero.abs().max() == 0
    pair = TwoTensor(draw(3, seed=2), draw(3, seed=2))
    y = ghost_batch_norm(x, None, None, pair, ghost=4)
    assert_close(getattr(y, "a", y), ghost_batch_norm_reference(x, None, None, pair.a, ghost=4))


def test_ghosts_are_those_of_the_plain_code_for_every_count():
    for samples in range(2, 40):
        x = draw(samples, 2, 3, seed=samples)
        for ghost in (2, 5, 7, 16):
            _, found = cpu.forward(x, None, None, ghost, 1e-5)
            _, expected = plain.forward(x, None, None, ghost, 1e-5)
            assert found.shape[1] == len(ghost_sizes(samples, ghost))
            assert_close(found, expected, rtol=1e-9, atol=1e-9)


# ---------------------------------------------------------------------------------------- building


BUILD = "import torch, ghostbatch.ops.cpu_build as b; assert b.library(torch.float64).forward"


@pytest.fixture
def fresh(tmp_path, monkeypatch):
    """An empty cache, and a count of what the compiler is asked for."""
    asked = []
    run = subprocess.run

    def counted(command, **options):
        asked.append(command)
        return run(command, **options)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cpu_build.subprocess, "run", counted)
    cpu_build.library.cache_clear()
    yield asked
    cpu_build.library.cache_clear()


def test_a_library_is_compiled_once_and_kept(fresh, tmp_path):
    assert cpu_build.library(torch.float64) is not None
    assert len(fresh) == 2  # compiled and linked
    assert len(list((tmp_path / "ghostbatch").iterdir())) == 1
    cpu_build.library.cache_clear()
    assert cpu_build.library(torch.float64) is not None
    assert len(fresh) == 2


def test_a_kept_library_that_was_cut_short_is_compiled_again(fresh, tmp_path):
    subprocess.run([sys.executable, "-c", BUILD], check=True)
    (kept,) = (tmp_path / "ghostbatch").iterdir()
    whole = kept.read_bytes()
    kept.write_bytes(whole[:1000])  # as a crash may leave it
    fresh.clear()
    assert cpu_build.library(torch.float64) is not None
    assert len(fresh) == 2
    assert [path.name for path in kept.parent.iterdir()] == [kept.name]
    assert len(kept.read_bytes()) == len(whole)


@pytest.mark.parametrize("obstacle", ["a file", "no rights"])
def test_without_a_cache_it_is_compiled_for_this_process(fresh, tmp_path, obstacle, monkeypatch):
    if obstacle == "a file":
        (tmp_path / "ghostbatch").write_text("")
    else:
        (tmp_path / "ghostbatch").mkdir()
        access = os.access  # root may write anywhere
        monkeypatch.setattr(os, "access", lambda at, how: how != os.W_OK and access(at, how))
    assert cpu_build.library(torch.float64) is not None
    assert len(fresh) == 2
    assert not list(tmp_path.rglob("*.so"))


def test_without_a_compiler_plain_code_is_used_and_nothing_said(fresh, monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    x = draw(8, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not paths.kernels_serve(x)
        assert_close(ghost_batch_norm(x, ghost=4), ghost_batch_norm_reference(x, ghost=4))
    assert not fresh


def test_a_compiler_that_fails_is_named_once_and_plain_code_is_used(fresh, tmp_path, monkeypatch):
    broken = tmp_path / "cc"
    broken.write_text("#!/bin/sh\necho 'cc: out of order' >&2\nexit 1\n")
    broken.chmod(broken.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CC", str(broken))
    x = draw(8, 3)
    with pytest.warns(UserWarning, match=r"plain code .* cc: out of order$"):
        y = ghost_batch_norm(x, ghost=4)
    again = ghost_batch_norm(x, ghost=4)  # another warning would be an error
    assert_close([y, again], [ghost_batch_norm_reference(x, ghost=4)] * 2)
    assert len(fresh) == 1


def test_several_processes_may_build_at_once(fresh, tmp_path):
    del fresh
    processes = [subprocess.Popen([sys.executable, "-W", "error", "-c", BUILD]) for _ in range(3)]
    assert [process.wait() for process in processes] == [0, 0, 0]
    assert len(list((tmp_path / "ghostbatch").iterdir())) == 1


def test_another_compiler_option_source_or_cpu_is_another_library(tmp_path, monkeypatch):
    cc = tmp_path / "cc"
    cc.write_text("one")
    keys = [cpu_build._key((str(cc),), ("-O3",)), cpu_build._key((str(cc),), ("-O2",))]
    keys.append(cpu_build._key((str(cc), "-m32"), ("-O3",)))
    assert cpu_build._key((str(cc),), ("-O3",)) == keys[0]
    cc.write_text("another")
    keys.append(cpu_build._key((str(cc),), ("-O3",)))
    source = tmp_path / "source.c"
    source.write_text("")
    monkeypatch.setattr(cpu_build, "SOURCE", source)
    keys.append(cpu_build._key((str(cc),), ("-O3",)))
    cpu = tmp_path / "cpuinfo"
    cpu.write_text("model name: other\nflags: sse\n\n")
    monkeypatch.setattr(cpu_build, "CPU", cpu)
    keys.append(cpu_build._key((str(cc),), ("-O3",)))
    assert len(set(keys)) == len(keys)


def test_the_compiler_may_be_named_with_options(fresh, monkeypatch):
    monkeypatch.setenv("CC", "cc -g0")
    assert cpu_build.library(torch.float64) is not None
    assert [command[1] for command in fresh] == ["-g0", "-g0"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_the_switch_and_other_dtypes_leave_it_to_plain_code(dtype, monkeypatch):
    x = draw(8, 3, dtype=dtype)
    assert paths.kernels_serve(x) == (dtype == torch.float32)
    monkeypatch.setenv(paths.SWITCH, "0")
    assert not paths.kernels_serve(x)
    monkeypatch.setenv(paths.SWITCH, "interpret")  # then Triton's serve, but none in fp64
    assert not paths.kernels_serve(x.double())
