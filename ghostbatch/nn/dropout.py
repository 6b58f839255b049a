"""Dropout whose masks depend on the update and on a sample's position in the batch, nothing else.

PyTorch draws a mask from one stream for whatever samples it is given, so the mask of a sample
changes with the number of ranks and micro-batches. Here each value is kept or dropped by a hash of
the update's key, the layer, the position of the sample in the whole batch, and the feature.
"""

import torch
from torch import Tensor, nn

BITS = 53
"""Of the hash that are compared with p: as many as a float holds."""


class BatchPosition:
    """Where the samples of the next forward stand; tensors, so that compiled code may read it."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.key = torch.zeros((), dtype=torch.long, device=device)
        self.first = torch.zeros((), dtype=torch.long, device=device)

    def set(self, key: int, first: int) -> None:
        """Say which update comes, and the position in its batch of the forward's first sample."""
        self.key.fill_(key)
        self.first.fill_(first)


class KeyedDropout(nn.Dropout):
    """nn.Dropout with a mask per position."""

    position: BatchPosition
    layer: int
    """Number of this layer in the model."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (nn.Dropout's name for it)
        """Drop values of (N, ...)."""
        return _dropped(self, input, tuple(input.shape[1:]))


class _KeyedChannels(nn.Module):
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """Drop whole channels of (N, C, ...)."""
        return _dropped(self, input, (input.shape[1], *(1,) * (input.dim() - 2)))


class KeyedDropout1d(_KeyedChannels, nn.Dropout1d):
    """nn.Dropout1d with a mask per position."""


class KeyedDropout2d(_KeyedChannels, nn.Dropout2d):
    """nn.Dropout2d with a mask per position."""


class KeyedDropout3d(_KeyedChannels, nn.Dropout3d):
    """nn.Dropout3d with a mask per position."""


KEYED: dict[type[nn.Module], type[nn.Module]] = {
    nn.Dropout: KeyedDropout,
    nn.Dropout1d: KeyedDropout1d,
    nn.Dropout2d: KeyedDropout2d,
    nn.Dropout3d: KeyedDropout3d,
}


def key_dropout(model: nn.Module, position: BatchPosition) -> int:
    """Have every dropout layer of ``model`` take its masks from ``position``; return their number.

    Only layers are found; a network that calls the function draws as PyTorch does.
    """
    keyed = 0
    for number, layer in enumerate(model.modules()):
        if type(layer) in KEYED:
            keyed += 1
            layer.__class__ = KEYED[type(layer)]
            layer.position = position  # type: ignore[assignment]
            layer.layer = number  # type: ignore[assignment]
    return keyed


def _dropped(layer: nn.Module, x: Tensor, features: tuple[int, ...]) -> Tensor:
    p, position = float(layer.p), layer.position  # type: ignore[arg-type]
    if not layer.training or p == 0:
        return x
    kept = keep_mask(position, layer.layer, x.shape[0], features, p)  # type: ignore[arg-type]
    mask = kept.to(x.dtype).div_(1 - p if p < 1 else 1)
    return x.mul_(mask) if layer.inplace else x * mask


def keep_mask(
    position: BatchPosition, layer: int, samples: int, features: tuple[int, ...], p: float
) -> Tensor:
    """Which values of (samples, *features) are kept: each with probability 1 - p."""
    device = position.key.device
    positions = torch.arange(samples, device=device).add_(position.first)
    rows = _mix(_mix(position.key + layer) + positions)
    columns = torch.arange(torch.Size(features).numel(), device=device)
    bits = _mix(rows.unsqueeze(1) + columns) >> (64 - BITS) & (1 << BITS) - 1
    return (bits >= int(p * 2**BITS)).view(samples, *features)


def _mix(x: Tensor) -> Tensor:
    """A well mixed 64-bit number for each: the step and the finaliser of splitmix64."""
    x = x * _signed(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ _shift(x, shift)) * _signed(factor)
    return x ^ _shift(x, 31)


def _shift(x: Tensor, by: int) -> Tensor:
    """To the right, filling with zeros; PyTorch's own would copy the sign."""
    return x >> by & (1 << 64 - by) - 1


def _signed(number: int) -> int:
    """The same 64 bits as a signed number."""
    return number - (1 << 64) if number >> 63 else number
