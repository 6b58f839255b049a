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

from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ghostbatch.errors import InputError, check_is
from ghostbatch.ops.backends.base import is_traced
from ghostbatch.ops.patches import patch_width, patches

Model = TypeVar("Model", bound=nn.Module)


class Shape(NamedTuple):
    """The sizes by which a fold is chosen."""

    fan_in: int
    fan_out: int
    kernel: int
    stride: int


FOLDS: dict[Shape, int] = {
    Shape(16, 16, 3, 1): 4,
    Shape(32, 32, 3, 1): 2,
    Shape(16, 32, 3, 2): 2,
    Shape(32, 64, 3, 2): 1,
    Shape(16, 32, 1, 2): 2,
    Shape(32, 64, 1, 2): 1,
}
"""Output pixels of a group that are fastest in bf16 on an H200; other shapes are not folded."""


PATCHES = frozenset({Shape(3, 16, 3, 1), Shape(3, 64, 3, 1), Shape(3, 64, 5, 1)})
"""First layers that are faster as a 1x1 convolution over patches of the image."""


class FoldedConv2d(nn.Conv2d):
    """nn.Conv2d that folds pixels into channels, if the group's width divides the image's."""

    pixels: int
    """Output pixels of a group."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (nn.Conv2d's name for it)
        """From (N, I, H, W) to (N, O, H / stride, W / stride).

        The weight may have been replaced by what `placed` returns, as `FlatWeights` does.
        """
        stride, weight = self.stride[0], self.weight
        is_placed = weight.shape[1] != self.in_channels
        known = input.dim() == 4 and input.shape[1] == self.in_channels
        if not known or input.shape[3] % (stride * self.pixels):
            if is_placed:
                weight = unfold_weight(weight, self.kernel_size[0], stride, self.pixels)
            return cast(Tensor, self._conv_forward(input, weight, self.bias))
        if not is_placed:
            weight = self.placed(weight)
        return folded_conv2d(input, weight, self.bias, stride, self.pixels)

    def placed(self, weight: Tensor) -> Tensor:
        """Return a weight (O, I, k, k) folded: (f O, s f I, k, q)."""
        return fold_weight(weight, self.stride[0], self.pixels)


class PatchConv2d(nn.Conv2d):
    """nn.Conv2d that copies the neighbourhood of each pixel into its channels first.

    For a first layer only: if the input requires a gradient, nn.Conv2d's forward runs.
    """

    @property
    def width(self) -> int:
        """Channels of the patches."""
        return patch_width(self.in_channels, self.kernel_size[0])

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (nn.Conv2d's name for it)
        """From (N, I, H, W), or from its `patches`, to (N, O, H, W).

        The weight may have been replaced by what `placed` returns, as `FlatWeights` does.
        """
        weight = self.weight
        is_placed = weight.shape[1] != self.in_channels
        are_patches = input.dim() == 4 and input.shape[1] == self.width
        if not (is_placed or are_patches) and (
            input.dim() != 4 or input.shape[1] != self.in_channels or input.requires_grad
        ):
            return super().forward(input)
        if torch.is_autocast_enabled(input.device.type):
            input = input.to(torch.get_autocast_dtype(input.device.type))  # noqa: A001
        x = input if are_patches else patches(input, self.kernel_size[0])
        return F.conv2d(x, weight if is_placed else self.placed(weight), self.bias)

    def placed(self, weight: Tensor) -> Tensor:
        """Return a weight (O, I, k, k) as that of a 1x1 convolution over patches."""
        rows = weight.permute(0, 2, 3, 1).flatten(1)
        return F.pad(rows, (0, self.width - rows.shape[1]))[:, :, None, None]


def fold_convolutions(model: Model, folds: dict[Shape, int] | None = None) -> Model:
    """Fold the narrow convolutions of ``model``, in place; return the model.

    Parameters stay the same objects, so optimizers, names and checkpoints stay valid. It pays on a
    GPU, in bf16 and channels_last. ``folds`` gives the output pixels of a group for each shape, by
    default those that are fastest on an H200. Layers whose ``forward`` was replaced are left alone.
    """
    check_is("model", model, nn.Module, "a torch.nn.Module")
    by_default = folds is None
    folds = FOLDS if folds is None else folds
    for size, pixels in folds.items():
        if size.kernel // 2 > size.stride * pixels:
            problem = f"a group of {pixels} pixels is too narrow for {size}"
            raise InputError("folds", problem, "use groups of more pixels")
    for layer in model.modules():
        shape = None
        if type(layer) is nn.Conv2d and "forward" not in vars(layer):
            shape = _shape(layer)
        if shape in folds:
            layer.__class__ = FoldedConv2d
            layer.pixels = folds[shape]  # type: ignore[assignment]
        elif by_default and shape in PATCHES:
            layer.__class__ = PatchConv2d
    return model


def unfold_convolutions(model: Model) -> Model:
    """Make every folded convolution of ``model`` plain again, in place; return the model."""
    check_is("model", model, nn.Module, "a torch.nn.Module")
    for layer in model.modules():
        if type(layer) in (FoldedConv2d, PatchConv2d):
            layer.__class__ = nn.Conv2d
            layer.__dict__.pop("pixels", None)
    return model


def fold_weight(weight: Tensor, stride: int, pixels: int) -> Tensor:
    """Return a weight (O, I, k, k) folded over groups: (f O, s f I, k, q), channels_last.

    Autocast does not apply: gradients of the copies of a weight are summed in its own dtype.
    """
    fan_out, fan_in, kernel, _ = weight.shape
    place = _placement_like(weight, kernel, stride, pixels)
    a, b, q, _ = place.shape
    with torch.autocast(weight.device.type, enabled=False):
        placed = weight.reshape(-1, kernel) @ place.view(-1, kernel).T
    placed = placed.view(fan_out, fan_in, kernel, a, b, q).permute(3, 0, 2, 5, 4, 1)
    return placed.reshape(a * fan_out, kernel, q, b * fan_in).permute(0, 3, 1, 2)


def unfold_weight(folded: Tensor, kernel: int, stride: int, pixels: int) -> Tensor:
    """Return the plain weight (O, I, k, k) of one that `fold_weight` made."""
    place = placement(kernel, stride, pixels)
    grouped = folded.unflatten(0, (pixels, -1)).unflatten(2, (place.shape[1], -1))
    taps = []
    for tap in place.unbind(-1):
        a, b, q = tap.nonzero()[0].tolist()  # one of the places of each tap
        taps.append(grouped[a, :, b, :, :, q])
    return torch.stack(taps, -1)


def folded_conv2d(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: int, pixels: int
) -> Tensor:
    """Convolve with a weight from `fold_weight`; return what the plain convolution returns."""
    N, C, H, W = x.shape
    group = stride * pixels
    grouped = x.permute(0, 2, 3, 1).reshape(N, H, W // group, group * C)
    padding = (weight.shape[2] // 2, weight.shape[3] // 2)
    bias = None if bias is None else bias.repeat(pixels)
    y = F.conv2d(grouped.permute(0, 3, 1, 2), weight, bias, (stride, 1), padding)
    y = y.permute(0, 2, 3, 1)
    fan_out = y.shape[3] // pixels
    return y.reshape(N, y.shape[1], y.shape[2] * pixels, fan_out).permute(0, 3, 1, 2)


def placement(kernel: int, stride: int, pixels: int) -> Tensor:
    """Return the 0/1 tensor (a, b, q, t) that puts weight t where output a meets input b of q.

    >>> placement(3, 1, 2)[0, :, :, 1]  # the middle weight joins a pixel to itself
    tensor([[0., 1., 0.],
            [0., 0., 0.]])
    """
    a = torch.arange(pixels).view(-1, 1, 1, 1)
    b = torch.arange(stride * pixels).view(-1, 1, 1)
    q = torch.tensor([0] if kernel == 1 else [-1, 0, 1]).view(-1, 1)
    t = torch.arange(kernel)
    return (stride * pixels * q + b - stride * a + kernel // 2 == t).float()


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
