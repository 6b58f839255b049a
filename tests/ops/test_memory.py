"""The memory that ghost norm takes beside its input, result and gradients."""

from pathlib import Path

import pytest
import torch
from norm_inputs import draw

from ghostbatch.ops import ghost_batch_norm
from ghostbatch.ops.backends import select

PROC = Path("/proc/self")


def peak() -> int:
    """Return the largest memory of this process since the last reset, in bytes."""
    (line,) = (line for line in (PROC / "status").read_text().splitlines() if "VmHWM" in line)
    return int(line.split()[1]) * 1024


def step(samples: int) -> None:
    x, dy = draw(2, samples, 1, dtype=torch.float32)
    weight, bias = torch.ones(1, requires_grad=True), torch.zeros(1, requires_grad=True)
    y = ghost_batch_norm(x.requires_grad_(), torch.zeros(1), torch.ones(1), weight, bias, ghost=2)
    y.backward(dy)


@pytest.mark.skipif(not PROC.exists(), reason="only Linux tells a process's memory")
@pytest.mark.parametrize(("kernels", "samples"), [("0", 8000), ("1", 10**6)])
def test_pairs_of_single_values_take_a_few_times_the_memory_of_their_input(
    kernels, samples, monkeypatch
):
    """The drawn input, statistics, result and gradients alone are twelve times the input.

    The bound leaves as much again for what the allocator keeps. The code that this test was
    written for took 35 times the input.
    """
    monkeypatch.setenv(select.SWITCH, kernels)
    step(100)  # loads what the first call loads
    (PROC / "clear_refs").write_text("5")  # resets the peak
    before = peak()
    step(samples)
    assert peak() - before < 24 * 4 * samples + (2 << 20)
