"""Folds narrow convolutions: groups of neighbouring pixels become the channels of one pixel.

GPUs compute convolutions of 16 or 32 channels far below their speed, because their matrix units
need more. In channels_last memory, (N, H, W, C) is also (N, H, W / f, f C), without a copy. The
same convolution over groups of f pixels has f times the channels. Its weight has w[o, i, r, t]
where output pixel a of a group meets input pixel b of the neighbouring group q, if

    t = s f q + b - s a + p        (stride s, padding p; output groups of f pixels, input of s f)

and zeros elsewhere. The result is the same up to rounding. The parameter stays (O, I, k, k): every
forward makes the folded weight by a product with a constant matrix of zeros and ones, so the
backward is such a product too.
"""

from functools import lru_cache
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ghostbatch.errors import InputError
from ghostbatch.ops.backends.base import is_traced

Model = TypeVar("Model", bound=nn.Module)


class Fold(NamedTuple):
    """How a convolution is folded."""

    pixels: int
    """Output pixels of a group."""
    channels: int = 0
    """Input channels after padding with zeros; 0 keeps them."""


class Shape(NamedTuple):
    """The sizes by which a fold is chosen."""

    fan_in: int
    fan_out: int
    kernel: int
    stride: int


FOLDS: dict[Shape, Fold] = {
    Shape(16, 16, 3, 1): Fold(4),
    Shape(32, 32, 3, 1): Fold(2),
    Shape(16, 32, 3, 2): Fold(2),
    Shape(32, 64, 3, 2): Fold(1),
    Shape(16, 32, 1, 2): Fold(2),
    Shape(32, 64, 1, 2): Fold(1),
    Shape(3, 16, 3, 1): Fold(8, 4),
}
"""The fastest folds in bf16 on an H200; other shapes are faster as they are."""


PATCHES = frozenset({Shape(3, 64, 3, 1), Shape(3, 64, 5, 1)})
"""First layers that are faster as a 1x1 convolution over patches of the image."""


class FoldedConv2d(nn.Conv2d):
    """nn.Conv2d that folds pixels into channels, if the group's width divides the image's."""

    fold: Fold

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (nn.Conv2d's name for it)
        """From (N, I, H, W) to (N, O, H / stride, W / stride).

        The weight may have been replaced by its folded form, as `call_with_cast_weights` does.
        """
        stride, weight = self.stride[0], self.weight
        is_folded = weight.shape[1] != self.in_channels
        known = input.dim() == 4 and input.shape[1] == self.in_channels
        if not known or input.shape[3] % (stride * self.fold.pixels):
            if is_folded:
                weight = unfold_weight(weight, self.kernel_size[0], stride, self.fold)
                weight = weight[:, : self.in_channels]
            return cast(Tensor, self._conv_forward(input, weight, self.bias))
        if not is_folded:
            weight = fold_weights(weight[None], stride, self.fold)[0]
        return folded_conv2d(input, weight, self.bias, stride, self.fold, self.in_channels)


class PatchConv2d(nn.Conv2d):
    """nn.Conv2d that copies the neighbourhood of each pixel into its channels first.

    For a first layer only: if the input requires a gradient, nn.Conv2d's forward runs.
    """

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (nn.Conv2d's name for it)
        """From (N, I, H, W) to (N, O, H, W)."""
        if input.dim() != 4 or input.shape[1] != self.in_channels or input.requires_grad:
            return super().forward(input)
        if torch.is_autocast_enabled(input.device.type):
            input = input.to(torch.get_autocast_dtype(input.device.type))  # noqa: A001
        x = patches(input, self.kernel_size[0])
        weight = self.weight.permute(0, 2, 3, 1).flatten(1)
        weight = F.pad(weight, (0, x.shape[1] - weight.shape[1]))
        return F.conv2d(x, weight[:, :, None, None], self.bias)


def patches(x: Tensor, kernel: int) -> Tensor:
    """Return the k x k pixels around each pixel as its channels, channels_last.

    The channels are padded with zeros to a multiple of 16, which matrix units like.
    """
    N, C, H, W = x.shape
    around = kernel // 2
    rows = F.pad(x.permute(0, 2, 3, 1), (0, 0, around, around, around, around))
    strides = rows.stride()
    windows = rows.as_strided((N, H, W, kernel, kernel * C), (*strides[:3], strides[1], strides[3]))
    used = kernel * kernel * C
    result = x.new_empty(N, H, W, -(-used // 16) * 16)
    result[..., :used].unflatten(-1, (kernel, -1)).copy_(windows)
    result[..., used:].zero_()
    return result.permute(0, 3, 1, 2)


def fold_convolutions(model: Model, folds: dict[Shape, Fold] | None = None) -> Model:
    """Fold the narrow convolutions of ``model``, in place; return the model.

    Parameters stay the same objects, so optimizers, names and checkpoints stay valid. It pays on a
    GPU, in bf16 and channels_last. ``folds`` says how each shape is folded; the default are the
    fastest on an H200. Layers whose ``forward`` was replaced stay as they are.
    """
    by_default = folds is None
    folds = FOLDS if folds is None else folds
    for size, fold in folds.items():
        if size.kernel // 2 > size.stride * fold.pixels:
            problem = f"a group of {fold.pixels} pixels is too narrow for {size}"
            raise InputError("folds", problem, "use groups of more pixels")
    for layer in model.modules():
        shape = None
        if type(layer) is nn.Conv2d and "forward" not in vars(layer):
            shape = _shape(layer)
        if shape in folds:
            layer.__class__ = FoldedConv2d
            layer.fold = folds[shape]  # type: ignore[assignment]
        elif by_default and shape in PATCHES:
            layer.__class__ = PatchConv2d
    return model


def unfold_convolutions(model: Model) -> Model:
    """Make every folded convolution of ``model`` plain again, in place; return the model."""
    for layer in model.modules():
        if type(layer) in (FoldedConv2d, PatchConv2d):
            layer.__class__ = nn.Conv2d
            layer.__dict__.pop("fold", None)
    return model


def fold_weights(weights: Tensor, stride: int, fold: Fold) -> Tensor:
    """Return stacked weights (L, O, I, k, k) folded: (L, f O, s f I, k, q), channels_last.

    Autocast does not apply: gradients of the copies of a weight are summed in its own dtype.
    """
    layers, fan_out, fan_in, kernel, _ = weights.shape
    if fold.channels > fan_in:
        weights = F.pad(weights, (0, 0, 0, 0, 0, fold.channels - fan_in))
        fan_in = fold.channels
    place = _placement_like(weights, kernel, stride, fold.pixels)
    a, b, q, _ = place.shape
    with torch.autocast(weights.device.type, enabled=False):
        placed = weights.reshape(-1, kernel) @ place.view(-1, kernel).T
    placed = placed.view(layers, fan_out, fan_in, kernel, a, b, q).permute(0, 4, 1, 3, 6, 5, 2)
    return placed.reshape(layers, a * fan_out, kernel, q, b * fan_in).permute(0, 1, 4, 2, 3)


def unfold_weight(folded: Tensor, kernel: int, stride: int, fold: Fold) -> Tensor:
    """Return the plain weight (O, I, k, k) of one that `fold_weights` made."""
    place = placement(kernel, stride, fold.pixels)
    grouped = folded.unflatten(0, (fold.pixels, -1)).unflatten(2, (place.shape[1], -1))
    taps = []
    for tap in place.unbind(-1):
        a, b, q = tap.nonzero()[0].tolist()  # one of the places of each tap
        taps.append(grouped[a, :, b, :, :, q])
    return torch.stack(taps, -1)


def folded_conv2d(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: int, fold: Fold, fan_in: int
) -> Tensor:
    """Convolve with a weight from `fold_weights`; return what the plain convolution returns."""
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
    return y.reshape(N, y.shape[1], y.shape[2] * fold.pixels, fan_out).permute(0, 3, 1, 2)


def placement(kernel: int, stride: int, pixels: int) -> Tensor:
    """Return the 0/1 tensor (a, b, q, t) that puts weight t where output a meets input b of q.

    >>> placement(3, 1, 2)[0, :, :, 1]  # the middle weight joins a pixel to itself
    tensor([[0., 1., 0.],
            [0., 0., 0.]])
    """
    return torch.tensor(_placement(kernel, stride, pixels))


@lru_cache
def _placement(kernel: int, stride: int, pixels: int) -> Any:
    """Return `placement` as nested lists: a cached tensor would keep the mode it was made in."""
    groups = (0,) if kernel == 1 else (-1, 0, 1)

    def is_there(a: int, b: int, q: int, t: int) -> float:
        return float(stride * pixels * q + b - stride * a + (kernel - 1) // 2 == t)

    return [
        [
            [[is_there(a, b, q, t) for t in range(kernel)] for q in groups]
            for b in range(stride * pixels)
        ]
        for a in range(pixels)
    ]


_PLACEMENTS: dict[Any, Tensor] = {}


def _placement_like(weights: Tensor, *sizes: int) -> Tensor:
    """Return `placement` with the dtype and device of the weights, kept for the next call.

    A CUDA graph cannot copy it from the host. What is made while a model is traced is not kept.
    """
    key = (*sizes, weights.dtype, weights.device)
    if key in _PLACEMENTS and not is_traced():
        return _PLACEMENTS[key]
    with torch.inference_mode(False):  # such a tensor could not be used in training
        place = placement(*sizes).to(weights)
    if type(place) is Tensor and not is_traced():
        _PLACEMENTS[key] = place
    return place


def _shape(layer: nn.Conv2d) -> Shape | None:
    """Return the sizes by which a layer's fold is chosen, or None if it cannot be folded."""
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
