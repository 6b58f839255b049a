"""Counters for the kernels: zero before their first use, and never used by two of them at once.

A kernel leaves its counters so that it can use them again (`tickets.draw`). A kernel in a CUDA
graph runs often, and never twice at a time: it gets counters of its own that are cleared once, when
nothing is being captured, which saves the graph a node for each. Every other launch gets new ones.
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


def counters(device: torch.device, count: int) -> Tensor:
    """So many counters for one kernel."""
    if device.type == "cuda":
        if not torch.cuda.is_current_stream_capturing():
            if device not in _stores:
                _stores[device] = Store(torch.zeros(ROOM, dtype=torch.int64, device=device))
        elif (store := _stores.get(device)) is not None and store.taken + count <= ROOM:
            store.taken += count  # for good: a graph does not say when it is gone
            return store.cleared[store.taken - count : store.taken]
    return torch.zeros(count, dtype=torch.int64, device=device)
