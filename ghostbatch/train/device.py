"""The device of a run, and how PyTorch computes there."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

import torch

from ghostbatch.errors import InputError, RankLocalError

READ_EVERY = {"cpu": 1, "cuda": 20}
"""The devices, and updates between two readings of the monitor there: each waits for the GPU."""

PROCESS = Lock()
"""Held while a run needs to be the only one of this process, where others may run in threads: while
it draws from PyTorch's default generators, captures a CUDA graph or empties the GPU's cache."""

LAUNCHES = Lock()
"""Held by a run on a GPU while it launches updates, so that runs in threads take turns."""


def find_device(name: str | torch.device | None) -> torch.device:
    """Return the device of that name, or the GPU if there is one; refuse one that is not there."""
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    kind, remedy = InputError, "use cpu"
    try:
        device = torch.device(name)
        if device.type == "cuda" and device.index is None and "LOCAL_RANK" in os.environ:
            name = device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            kind, remedy = RankLocalError, "use as many ranks as this machine has GPUs, or cpu"
        torch.empty(0, device=device)
        usable = device.type in READ_EVERY
    except (RuntimeError, AssertionError):  # which one depends on PyTorch's build
        usable = False
    if not usable:
        raise kind("device", f"{name} is not available here", remedy)
    return device


@contextmanager
def cudnn_choice(deterministic: bool) -> Iterator[None]:
    """Let cuDNN choose algorithms by timing them, or only those that repeat their bits."""
    cudnn = torch.backends.cudnn
    before = cudnn.benchmark, cudnn.deterministic
    cudnn.benchmark, cudnn.deterministic = not deterministic, deterministic
    try:
        yield
    finally:
        cudnn.benchmark, cudnn.deterministic = before


MOST_THREADS = 1024
"""Larger numbers are refused: OpenMP ends the process where it cannot start as many."""


def check_threads(count: int | None) -> None:
    """Refuse a number of threads that no machine has."""
    if count is not None and count > MOST_THREADS:
        raise InputError("threads", f"{count} is above {MOST_THREADS}", "use one per core")


@contextmanager
def thread_count(count: int) -> Iterator[None]:
    """Compute with ``count`` threads: another number would round differently."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
