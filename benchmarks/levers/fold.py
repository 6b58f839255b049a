"""Exact folding of narrow convolutions: f neighbouring pixels of C channels become one of f C.

In channels_last memory (N, H, W, C) is (N, H, W / f, f C) without a copy. The same convolution over
groups of pixels has more channels, which suits tensor cores better than a few do. Its weight has
w[o, i, r, t] at output pixel a, input pixel b and neighbouring group q where

    t = s f q + b - s a + p        (stride s, padding p; output groups of f pixels, input of s f)

and zeros elsewhere. Rows are convolved as before. The parameter stays (O, I, k, k): the weights of
one shape are stacked and unfolded by one small product with a constant 0/1 matrix, so the backward
is such a product, too, and needs no atomics.
"""

from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Model = TypeVar("Model", bound=nn.Module)


class Fold(NamedTuple):
    """How a convolution is folded."""

    pixels: int
    """Output pixels of a group."""
    channels: int = 0
    """Input channels after padding with zeros; 0: as they are."""


class Shape(NamedTuple):
    """What decides how a convolution should be folded."""

    fan_in: int
    fan_out: int
    kernel: int
    stride: int


FACTORS: dict[Shape, Fold] = {  # the fastest on an H200
    Shape(16, 16, 3, 1): Fold(4),
    Shape(32, 32, 3, 1): Fold(2),
    Shape(16, 32, 3, 2): Fold(2),
    Shape(32, 64, 3, 2): Fold(1),
    Shape(16, 32, 1, 2): Fold(2),
    Shape(32, 64, 1, 2): Fold(1),
    Shape(3, 16, 3, 1): Fold(8, 4),
}
COLUMNS = {Shape(3, 64, 3, 1), Shape(3, 64, 5, 1)}
"""First layers that are faster as a 1x1 convolution over patches, made with the batch."""


# ------------------------------------------------------------------------------------- convolution


@lru_cache
def placement(kernel: int, stride: int, pixels: int, device: str = "cpu") -> Tensor:
    """Return the 0/1 tensor (a, b, q, t) that puts weight t where output a meets input b of q.

    >>> placement(3, 1, 2)[0, :, :, 1]  # the middle weight joins a pixel to itself
    tensor([[0., 1., 0.],
            [0., 0., 0.]])
    """
    taps = 1 if kernel == 1 else 3
    a, b, q, t = torch.meshgrid(
        torch.arange(pixels),
        torch.arange(stride * pixels),
        torch.arange(taps) - taps // 2,
        torch.arange(kernel),
        indexing="ij",
    )
    place = stride * pixels * q + b - stride * a + (kernel - 1) // 2 == t
    return place.float().to(device)


def fold_weights(weights: Tensor, stride: int, fold: Fold) -> Tensor:
    """Unfold stacked weights (L, O, I, k, k) to (L, f O, s f I, k, q), channels last in memory."""
    layers, fan_out, fan_in, kernel, _ = weights.shape
    if fold.channels > fan_in:
        weights = F.pad(weights, (0, 0, 0, 0, 0, fold.channels - fan_in))
        fan_in = fold.channels
    place = placement(kernel, stride, fold.pixels, str(weights.device)).to(weights.dtype)
    a, b, q, _ = place.shape
    placed = weights.reshape(-1, kernel) @ place.view(-1, kernel).T
    placed = placed.view(layers, fan_out, fan_in, kernel, a, b, q).permute(0, 4, 1, 3, 6, 5, 2)
    return placed.reshape(layers, a * fan_out, kernel, q, b * fan_in).permute(0, 1, 4, 2, 3)


def folded_conv2d(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: int, fold: Fold, fan_in: int
) -> Tensor:
    """Convolve with a weight that `fold_weights` made; return what the plain convolution would."""
    N, C, H, W = x.shape
    group = stride * fold.pixels
    rows = x.permute(0, 2, 3, 1)
    if fold.channels > C:
        rows = F.pad(rows, (0, fold.channels - C))
    grouped = rows.reshape(N, H, W // group, group * max(fold.channels, fan_in))
    padding = (weight.shape[2] // 2, weight.shape[3] // 2)
    bias = None if bias is None else bias.repeat(fold.pixels)
    y = F.conv2d(grouped.permute(0, 3, 1, 2), weight, bias, (stride, 1), padding)
    y = y.permute(0, 2, 3, 1)
    fan_out = y.shape[3] // fold.pixels
    return y.reshape(N, y.shape[1], -1, fan_out).permute(0, 3, 1, 2)


# ----------------------------------------------------------------------------------------- modules


class FoldedConv2d(nn.Conv2d):
    """nn.Conv2d whose forward folds pixels into channels; odd widths are convolved as they are."""

    fold: Fold
    folded: Tensor | None
    """The unfolded weight of this forward, if the whole model is running."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (nn.Conv2d's name for it)
        """From (N, I, H, W) to (N, O, H / stride, W / stride)."""
        stride = self.stride[0]
        if input.dim() != 4 or input.shape[3] % (stride * self.fold.pixels):
            return super().forward(input)
        weight = self.folded
        if weight is None:
            (weight,) = _unfolded([self])
        return folded_conv2d(input, weight, self.bias, stride, self.fold, self.in_channels)

    def placed(self, weight: Tensor) -> Tensor:
        """Return ``weight`` (O, I, k, k) as the folded convolution takes it."""
        return fold_weights(weight[None], self.stride[0], self.fold)[0]


def fold_convolutions(model: Model, factors: dict[Shape, Fold] | None = None) -> Model:
    """Fold the convolutions of ``model`` that ``factors`` lists, in place; return the model.

    Parameters, names and state_dict stay as they are.
    """
    factors = FACTORS if factors is None else factors
    found = [(m, _shape(m)) for m in model.modules() if type(m) is nn.Conv2d]
    layers = [(layer, factors[shape]) for layer, shape in found if shape in factors]
    for layer, fold in layers:
        layer.__class__ = FoldedConv2d
        layer.fold, layer.folded = fold, None  # type: ignore[assignment]
    if layers and not hasattr(model, "fold_hooks"):
        before = model.register_forward_pre_hook(_unfold_all)
        after = model.register_forward_hook(_forget_all, always_call=True)
        model.fold_hooks = (before, after)  # type: ignore[assignment]
    return model


def unfold_convolutions(model: Model) -> Model:
    """Make every folded convolution of ``model`` plain again; return the model."""
    for layer in model.modules():
        if type(layer) is FoldedConv2d:
            layer.__class__ = nn.Conv2d  # type: ignore[assignment]
            del layer.fold, layer.folded
    remove_hooks(model)
    return model


def remove_hooks(model: nn.Module) -> None:
    """Stop unfolding the weights of all layers together before each forward."""
    for hook in model.__dict__.pop("fold_hooks", ()):
        hook.remove()


def _shape(layer: nn.Conv2d) -> Shape | None:
    """Return what decides the folding, or None if the layer cannot be folded."""
    kernel, stride = layer.kernel_size[0], layer.stride[0]
    plain = (
        layer.kernel_size == (kernel, kernel)
        and kernel % 2 == 1
        and layer.stride == (stride, stride)
        and layer.padding == (kernel // 2, kernel // 2)
        and layer.dilation == (1, 1)
        and layer.groups == 1
        and layer.padding_mode == "zeros"
    )
    return Shape(layer.in_channels, layer.out_channels, kernel, stride) if plain else None


def _unfold_all(model: nn.Module, _: Any) -> None:
    """Before a forward: unfold the weights of all layers, those of one shape together."""
    groups: dict[Any, list[FoldedConv2d]] = {}
    for layer in model.modules():
        if isinstance(layer, FoldedConv2d):
            groups.setdefault((_shape(layer), layer.fold, layer.weight.dtype), []).append(layer)
    for layers in groups.values():
        for layer, weight in zip(layers, _unfolded(layers), strict=True):
            layer.folded = weight


def _forget_all(model: nn.Module, *_: Any) -> None:
    for layer in model.modules():
        if isinstance(layer, FoldedConv2d):
            layer.folded = None


def _unfolded(layers: list[FoldedConv2d]) -> tuple[Tensor, ...]:
    """Unfold the weights of layers of one shape, in their own precision; cast as autocast would."""
    kind = layers[0].weight.device.type
    with torch.autocast(kind, enabled=False):
        stacked = torch.stack([layer.weight for layer in layers])
        weights = fold_weights(stacked, layers[0].stride[0], layers[0].fold)
    if torch.is_autocast_enabled(kind):
        weights = weights.to(torch.get_autocast_dtype(kind))
    return weights.unbind()


# ----------------------------------------------------------------------------------------- columns


class ColumnConv2d(nn.Conv2d):
    """nn.Conv2d that also takes patches: batches whose channels are `columns` of an image."""

    width: int
    """Channels of such a batch."""
    folded: Tensor | None
    """The weight as a 1x1 convolution takes it, if someone keeps it."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (nn.Conv2d's name for it)
        """From (N, I, H, W) or its patches, (N, width, H, W), to (N, O, H, W)."""
        if input.shape[1] != self.width:
            return super().forward(input)
        weight = self.placed(self.weight) if self.folded is None else self.folded
        return F.conv2d(input, weight, self.bias)

    def placed(self, weight: Tensor) -> Tensor:
        """Return ``weight`` (O, I, k, k) as (O, width, 1, 1)."""
        flat = weight.permute(0, 2, 3, 1).flatten(1)
        return F.pad(flat, (0, self.width - flat.shape[1]))[:, :, None, None]


def take_columns(model: Model, shapes: set[Shape] | None = None) -> Model:
    """Let the first convolution of ``model`` take patches if its shape is listed."""
    first = next((m for m in model.modules() if isinstance(m, nn.Conv2d)), None)
    if type(first) is nn.Conv2d and _shape(first) in (COLUMNS if shapes is None else shapes):
        first.__class__ = ColumnConv2d
        first.width = column_width(first.in_channels, first.kernel_size[0])  # type: ignore[assignment]
        first.folded = None  # type: ignore[assignment]
    return model


def column_width(channels: int, kernel: int) -> int:
    """Return the values of a patch, rounded up to what tensor cores like.

    >>> column_width(3, 3), column_width(3, 5)
    (32, 80)
    """
    return -(-channels * kernel**2 // 16) * 16


def columns(x: Tensor, kernel: int) -> Tensor:
    """Return the patches of images as channels, row by row, pixel by pixel, padded with zeros.

    Slow: for tests and measurements. `batch` writes them directly.
    """
    N, C, H, W = x.shape
    patches = F.unfold(x, kernel, padding=kernel // 2).view(N, C, kernel**2, H, W)
    patches = patches.transpose(1, 2).reshape(N, C * kernel**2, H, W)
    padding = column_width(C, kernel) - patches.shape[1]
    return F.pad(patches, (0, 0, 0, 0, 0, padding)).contiguous(memory_format=torch.channels_last)
