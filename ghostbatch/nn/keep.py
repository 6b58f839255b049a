"""Puts the buffers of a model back as they were."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def kept_buffers(model: nn.Module) -> Iterator[None]:
    """Restore all buffers of ``model`` on exit, bit for bit, also those that were replaced.

    >>> class Counter(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.register_buffer("calls", torch.zeros(()))
    >>> counter = Counter()
    >>> with kept_buffers(counter):
    ...     counter.calls = counter.calls + 1
    >>> counter.calls
    tensor(0.)
    """
    places = [
        (module, name, buffer)
        for module in model.modules()
        for name, buffer in module._buffers.items()
    ]
    copies = {b: b.detach().clone() for _, _, b in places if b is not None}
    try:
        yield
    finally:
        for module, name, buffer in places:
            if getattr(module, name) is not buffer:
                setattr(module, name, buffer)
        with torch.no_grad():
            for buffer, copy in copies.items():
                buffer.copy_(copy)
