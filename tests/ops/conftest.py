"""What the tests of the kernels share."""

import platform

import pytest
import torch

from ghostbatch.ops import cpu, cpu_build


@pytest.fixture
def compiler() -> None:
    """Tests of the CPU kernels run where they can be compiled."""
    if cpu_build.find_compiler() is None:
        pytest.skip("there is no C compiler")


@pytest.fixture
def cut_small(compiler, monkeypatch):
    """Kernels with limits so low that small batches meet every case, and three threads."""
    del compiler
    narrow = ("-mno-avx",) if platform.machine() == "x86_64" else ()  # several vectors to a row
    library = cpu_build.library
    monkeypatch.setattr(cpu, "library", lambda dtype: library(dtype, "-DCUT_SMALL", *narrow))
    torch.set_num_threads(3)
