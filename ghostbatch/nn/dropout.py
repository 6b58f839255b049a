"""Dropout whose masks depend only on the update and on a sample's position in the batch.

PyTorch draws masks from one stream of random numbers, so the mask of a sample changes with the
number of ranks and micro-batches. Here each value is kept or dropped by a hash of the update's key,
the layer, the position of the sample in the batch of all ranks, and the feature.
"""

import torch
from torch import Tensor, nn

from ghostbatch.ops.backends.base import has_triton

BITS = 53
"""Bits of the hash that are compared with p: as many as a float holds."""


class BatchPosition:
    """The key of an update, and the batch position of the next forward's first sample.

    Both are tensors, so that compiled code reads them too.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.key = torch.zeros((), dtype=torch.long, device=device)
        self.first = torch.zeros((), dtype=torch.long, device=device)

    def set(self, key: int, first: int) -> None:
        """Set the update's key, and the batch position of the next forward's first sample."""
        self.key.fill_(key)
        self.first.fill_(first)


class _Keyed(nn.Module):
    """The forward of all dropout layers with masks by position."""

    p: float
    inplace: bool
    position: BatchPosition
    layer: int
    """Number of this layer in the model."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (nn.Dropout's name for it)
        """Drop single values of (N, ...) if this is an nn.Dropout, else channels of (N, C, ...)."""
        x, p, position = input, float(self.p), self.position
        if not self.training or p == 0:
            return x
        features = tuple(x.shape[1:])
        if not isinstance(self, nn.Dropout):
            features = (x.shape[1], *(1,) * (x.dim() - 2))
        scale = torch.ones((), dtype=x.dtype).div_(1 - p if p < 1 else 1)
        if not self.inplace and has_triton(x) and x.numel() and x.is_contiguous():
            from ghostbatch.ops.dropout import KeyedDropoutFunction  # noqa: PLC0415 (imports triton)

            rule = self.layer, torch.Size(features).numel(), int(p * 2**BITS), float(scale)
            return KeyedDropoutFunction.apply(x, position.key, position.first, *rule)  # type: ignore[no-any-return, no-untyped-call]
        kept = keep_mask(position, self.layer, x.shape[0], features, p)
        mask = kept.to(x.dtype).mul_(float(scale))
        return x.mul_(mask) if self.inplace else x * mask


class KeyedDropout(_Keyed, nn.Dropout):
    """nn.Dropout with masks by position."""


class KeyedDropout1d(_Keyed, nn.Dropout1d):
    """nn.Dropout1d with masks by position."""


class KeyedDropout2d(_Keyed, nn.Dropout2d):
    """nn.Dropout2d with masks by position."""


class KeyedDropout3d(_Keyed, nn.Dropout3d):
    """nn.Dropout3d with masks by position."""


KEYED: dict[type[nn.Module], type[nn.Module]] = {
    nn.Dropout: KeyedDropout,
    nn.Dropout1d: KeyedDropout1d,
    nn.Dropout2d: KeyedDropout2d,
    nn.Dropout3d: KeyedDropout3d,
}


def key_dropout(model: nn.Module, position: BatchPosition) -> int:
    """Let the dropout layers of ``model`` take their masks from ``position``; return their number.

    These are the layers of `KEYED`, and those that have a position already. Other layers, and calls
    of ``F.dropout`` in a network's forward, draw as PyTorch does.
    """
    keyed = 0
    for number, layer in enumerate(model.modules()):
        if type(layer) in KEYED:
            layer.__class__ = KEYED[type(layer)]
        if isinstance(layer, _Keyed):
            layer.position, layer.layer = position, number
            keyed += 1
    return keyed


def keep_mask(
    position: BatchPosition, layer: int, samples: int, features: tuple[int, ...], p: float
) -> Tensor:
    """Return which values of (samples, *features) are kept: each with probability 1 - p."""
    device = position.key.device
    positions = torch.arange(samples, device=device).add_(position.first)
    rows = _mix(_mix(position.key + layer) + positions)
    columns = torch.arange(torch.Size(features).numel(), device=device)
    bits = _mix(rows.unsqueeze(1) + columns) >> (64 - BITS) & (1 << BITS) - 1
    return (bits >= int(p * 2**BITS)).view(samples, *features)


def _mix(x: Tensor) -> Tensor:
    """Hash each 64-bit number: the step and the finaliser of splitmix64."""
    x = x * _signed(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ _shift(x, shift)) * _signed(factor)
    return x ^ _shift(x, 31)


def _shift(x: Tensor, by: int) -> Tensor:
    """Shift to the right, filling with zeros; PyTorch's ``>>`` would copy the sign."""
    return x >> by & (1 << 64 - by) - 1


def _signed(number: int) -> int:
    """Return the same 64 bits as a signed number."""
    return number - (1 << 64) if number >> 63 else number
