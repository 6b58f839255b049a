"""What the tests of the backends share."""

import platform

import pytest
import torch

from ghostbatch.ops.backends import select, tensor
from ghostbatch.ops.backends.c import bind, build
from ghostbatch.ops.backends.triton import launch
from ghostbatch.ops.backends.triton.tiling import Tuning

SMALL = Tuning(warps=1, vectors=2, subtiles=2, channels=16, programs=2)


@pytest.fixture
def compiler() -> None:
    """Skip tests of the C kernels where they cannot be compiled."""
    if build.find_compiler() is None:
        pytest.skip("there is no C compiler")


@pytest.fixture
def cut_small(compiler, monkeypatch):
    """C kernels with limits so low that small batches go through every case, and three threads."""
    del compiler
    narrow = ("-mno-avx",) if platform.machine() == "x86_64" else ()  # several vectors to a row
    library = build.library
    monkeypatch.setattr(bind, "library", lambda dtype: library(dtype, "-DCUT_SMALL", *narrow))
    torch.set_num_threads(3)


@pytest.fixture(
    params=[
        "C as shipped",
        "C cut small",
        "tensor code ghost by ghost",
        "tensor code on all ghosts",
    ]
)
def backend(request, monkeypatch):
    """Run each backend; tensor code also as on devices other than a CPU."""
    if request.param == "C cut small":
        request.getfixturevalue("cut_small")
    elif request.param != "C as shipped":
        monkeypatch.setenv(select.SWITCH, "0")
        if request.param == "tensor code on all ghosts":
            monkeypatch.setattr(tensor, "GHOST_BY_GHOST", ())


@pytest.fixture
def interpreted(interpreted, monkeypatch):
    """Run the Triton kernels on CPU tensors, with small tiles."""
    del interpreted
    monkeypatch.setattr(launch, "tuning", lambda *_: SMALL)


@pytest.fixture
def launches(monkeypatch):
    """Return a list of the Triton kernels that are launched."""
    seen, launch_kernel = [], launch._launch

    def counted(kernel, *arguments, **constants):
        seen.append(kernel)
        launch_kernel(kernel, *arguments, **constants)

    monkeypatch.setattr(launch, "_launch", counted)
    return seen
