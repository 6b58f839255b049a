"""Counters for the kernels: zero before their first use, and never shared by two running kernels.

A kernel can use its counters again without clearing them (`primitives.next_ticket`). A kernel in a
CUDA graph runs often, but never twice at a time, so it keeps its counters; they were cleared before
the capture, which saves the graph a node for each. Every other launch gets new ones.

Counters for graphs come from a store that the first eager call makes. A warm-up of a CUDA graph
must not make it: the graph's memory pool would use that memory again.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

ROOM = 1 << 18
"""Counters for captured kernels, 2 MB on each device; a layer's step takes a hundred or so."""


@dataclass
class Store:
    """Zeroed counters, and how many of them are taken."""

    cleared: Tensor
    taken: int = 0


_stores: dict[torch.device, Store] = {}


def make_store(device: torch.device) -> None:
    """Make the store of a device, unless it exists or a graph is being captured."""
    if device.type == "cuda" and device not in _stores and not _capturing(device):
        _stores[device] = Store(torch.zeros(ROOM, dtype=torch.int64, device=device))


def counters(device: torch.device, count: int) -> Tensor:
    """Return ``count`` zeroed int64 counters for one kernel."""
    store = _stores.get(device)
    if store is not None and store.taken + count <= len(store.cleared) and _capturing(device):
        store.taken += count  # never returned: nothing tells when a graph is destroyed
        return store.cleared[store.taken - count : store.taken]
    return torch.zeros(count, dtype=torch.int64, device=device)


def _capturing(device: torch.device) -> bool:
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()
