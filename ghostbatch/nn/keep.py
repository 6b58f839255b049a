"""Puts the buffers of a model back as they were."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def kept_buffers(model: nn.Module) -> Iterator[None]:
    """Restore the buffers of ``model`` on exit, bit for bit.

    A buffer that was replaced is put back, too, unless it is not persistent: then it is a cache,
    and Python attributes of the layer may belong to the new one.

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
    before = [(module, dict(module._buffers.items())) for module in model.modules()]
    copies = {b: b.detach().clone() for _, each in before for b in each.values() if b is not None}
    try:
        yield
    finally:
        for module, buffers in before:
            if isinstance(module._buffers, dict):  # that of a scripted layer cannot be changed
                caches = module._non_persistent_buffers_set
                module._buffers.update({n: b for n, b in buffers.items() if n not in caches})
        with torch.no_grad():
            for buffer, copy in copies.items():
                if not buffer.equal(copy):  # one that is expanded could not be written to
                    buffer.copy_(copy)
