"""Dropout whose masks depend on the update and on a sample's place in the batch, nothing else.

PyTorch draws a mask from one stream for whatever samples it is given, so the mask of a sample
changes with the number of ranks and micro-batches. Here each value is kept or dropped by a hash of
the update's key, the layer, the position of the sample in the whole batch, and the feature.
"""

import torch
from torch import Tensor, nn

BITS = 53
"""Of the hash that are compared with p: as many as a float holds."""


class Place:
    """Where the samples of the next forward stand; tensors, so that compiled code may read it."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.key = torch.zeros((), dtype=torch.long, device=device)
        self.first = torch.zeros((), dtype=torch.long, device=device)

    def move(self, key: int, first: int) -> None:
        """Say which update comes, and the position in its batch of the forward's first sample."""
        self.key.fill_(key)
        self.first.fill_(first)


class PlacedDropout(nn.Dropout):
    """nn.Dropout with a mask per place."""

    place: Place
    layer: int
    """Number of this layer in the model."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (nn.Dropout's name for it)
        """Drop values of (N, ...)."""
        return _dropped(self, input, tuple(input.shape[1:]))


class _PlacedChannels(nn.Module):
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """Drop whole channels of (N, C, ...)."""
        return _dropped(self, input, (input.shape[1], *(1,) * (input.dim() - 2)))


class PlacedDropout1d(_PlacedChannels, nn.Dropout1d):
    """nn.Dropout1d with a mask per place."""


class PlacedDropout2d(_PlacedChannels, nn.Dropout2d):
    """nn.Dropout2d with a mask per place."""


class PlacedDropout3d(_PlacedChannels, nn.Dropout3d):
    """nn.Dropout3d with a mask per place."""


PLACED: dict[type[nn.Module], type[nn.Module]] = {
    nn.Dropout: PlacedDropout,
    nn.Dropout1d: PlacedDropout1d,
    nn.Dropout2d: PlacedDropout2d,
    nn.Dropout3d: PlacedDropout3d,
}


def place_dropout(model: nn.Module, place: Place) -> None:
    """Have every dropout layer of ``model`` take its masks from ``place``.

    Only layers are found; a network that calls the function draws as PyTorch does.
    """
    for number, layer in enumerate(model.modules()):
        if type(layer) in PLACED:
            layer.__class__ = PLACED[type(layer)]
            layer.place = place  # type: ignore[assignment]
            layer.layer = number  # type: ignore[assignment]


def _dropped(layer: nn.Module, x: Tensor, features: tuple[int, ...]) -> Tensor:
    p, place = float(layer.p), layer.place  # type: ignore[arg-type]
    if not layer.training or p == 0:
        return x
    kept = keep_mask(place, layer.layer, x.shape[0], features, p)  # type: ignore[arg-type]
    mask = kept.to(x.dtype).div_(1 - p if p < 1 else 1)
    return x.mul_(mask) if layer.inplace else x * mask


def keep_mask(
    place: Place, layer: int, samples: int, features: tuple[int, ...], p: float
) -> Tensor:
    """Which values of (samples, *features) are kept: each with probability 1 - p."""
    device = place.key.device
    positions = torch.arange(samples, device=device).add_(place.first)
    rows = _mix(_mix(place.key + layer) + positions)
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
