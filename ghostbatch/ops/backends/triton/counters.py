"""Counters for the kernels: zero before their first use, and never used by two of them at once.

A kernel leaves its counters so that it can use them again (`tickets.draw`). A kernel in a CUDA
graph runs often, and never twice at a time: it gets counters of its own that were cleared before
anything was captured, which saves the graph a node for each. Every other launch gets new ones.

They come from a store that the first eager call makes. Compiled code must not make it: what it
allocates in a warm-up belongs to its graphs, and they would use the memory for something else.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

ROOM = 1 << 18
"""Counters for captured kernels, 2 MB on each device; a layer's step takes a hundred or so."""


@dataclass
class Store:
    """Cleared counters, and how many of them are taken."""

    cleared: Tensor
    taken: int = 0


_stores: dict[torch.device, Store] = {}


def make_store(device: torch.device) -> None:
    """Make a device's store, from eager code, unless there is one or something is captured."""
    if device.type == "cuda" and device not in _stores and not _capturing(device):
        _stores[device] = Store(torch.zeros(ROOM, dtype=torch.int64, device=device))


def counters(device: torch.device, count: int) -> Tensor:
    """So many counters for one kernel."""
    store = _stores.get(device)
    if store is not None and store.taken + count <= len(store.cleared) and _capturing(device):
        store.taken += count  # for good: a graph does not say when it is gone
        return store.cleared[store.taken - count : store.taken]
    return torch.zeros(count, dtype=torch.int64, device=device)


def _capturing(device: torch.device) -> bool:
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()
