"""Folded convolutions on the GPU: checked against plain ones, timed shape by shape."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from flat import Flat
from fold import (
    Fold,
    Shape,
    _forget_all,
    _unfold_all,
    column_width,
    columns,
    fold_convolutions,
    fold_weights,
)
from timing import DEVICE, buffers, demand, milliseconds, relative_error, show, write
from torch import Tensor

from ghostbatch.nn.networks import resnet44

BATCH = 4096 if DEVICE == "cuda" else 2
PLAIN = Fold(0)
COLUMNS = Fold(-1)  # patches as channels, made beforehand; a 1x1 convolution or a matrix product
MATMUL = Fold(-2)
STEM = [PLAIN, Fold(2, 4), Fold(4, 4), Fold(8, 4), Fold(2, 8), COLUMNS, MATMUL]
CASES: list[tuple[int, Shape, int, list[Fold]]] = [  # batch, shape, pixels, variants
    (BATCH, Shape(16, 16, 3, 1), 32, [PLAIN, Fold(2), Fold(4), Fold(8)]),
    (BATCH, Shape(32, 32, 3, 1), 16, [PLAIN, Fold(2), Fold(4)]),
    (BATCH, Shape(64, 64, 3, 1), 8, [PLAIN, Fold(2)]),
    (BATCH, Shape(3, 16, 3, 1), 32, [PLAIN, Fold(4, 4), Fold(8, 4), Fold(16, 4), Fold(4, 8)]),
    (BATCH, Shape(16, 32, 3, 2), 32, [PLAIN, Fold(1), Fold(2), Fold(4)]),
    (BATCH, Shape(32, 64, 3, 2), 16, [PLAIN, Fold(1), Fold(2)]),
    (BATCH, Shape(16, 32, 1, 2), 32, [PLAIN, Fold(1), Fold(2)]),
    (BATCH, Shape(32, 64, 1, 2), 16, [PLAIN, Fold(1)]),
    (BATCH, Shape(3, 64, 3, 1), 32, STEM),
    (BATCH, Shape(64, 64, 3, 1), 32, [PLAIN, Fold(2)]),
    (BATCH, Shape(64, 128, 3, 2), 32, [PLAIN, Fold(1)]),
    (BATCH, Shape(64, 128, 1, 2), 32, [PLAIN, Fold(1)]),
    (BATCH, Shape(3, 64, 5, 1), 32, STEM),
    (BATCH, Shape(64, 64, 5, 1), 15, [PLAIN]),
    (min(128, BATCH), Shape(16, 16, 3, 1), 32, [PLAIN, Fold(2), Fold(4), Fold(8)]),
    (min(128, BATCH), Shape(32, 32, 3, 1), 16, [PLAIN, Fold(2), Fold(4)]),
    (min(128, BATCH), Shape(64, 64, 3, 1), 8, [PLAIN, Fold(2)]),
    (min(128, BATCH), Shape(3, 16, 3, 1), 32, [PLAIN, Fold(8, 4)]),
]


def main(path: Path | None = None) -> None:
    """Check and time all cases, and the unfolding of all weights of ResNet44."""
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = False
    for shape, pixels, fold in {
        (shape, pixels, fold)
        for _, shape, pixels, folds in CASES
        for fold in folds
        if fold.pixels > 0
    }:
        _check(shape, pixels, fold)
    results = []
    for batch, shape, pixels, folds in CASES:
        for fold in folds:
            times = _measure(batch, shape, pixels, fold)
            case = {"batch": batch, "shape": [*shape, pixels], "fold": _name(fold)}
            results.append(case | times | {"sum": sum(times.values())})
    write(path, {"results": results})
    parts = ["forward", "dgrad", "wgrad", "sum"]
    rows: list[list[object]] = []
    for r in results:
        same = [s for s in results if (s["batch"], s["shape"]) == (r["batch"], r["shape"])]
        best = "*" if r["sum"] == min(s["sum"] for s in same) else ""
        rows.append([r["batch"], r["shape"], r["fold"], *(r.get(c) for c in parts), best])
    print("milliseconds, bf16, channels_last; shape: in, out, kernel, stride, pixels")
    show(["batch", "shape", "pixels/channels", *parts, ""], rows)
    print("unfolding all weights of ResNet44, forward + backward, ms:", flush=True)
    print(f"{_unfolding():.4f} by products, {_flat_unfolding():.4f} flat, with clip and SGD")


def _name(fold: Fold) -> str:
    names = {PLAIN: "plain", COLUMNS: "columns, conv 1x1", MATMUL: "columns, matmul"}
    return names.get(fold, f"f={fold.pixels}" + (f" C={fold.channels}" if fold.channels else ""))


def draw(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Normal values in channels_last."""
    x = torch.randn(shape[0], *shape[2:], shape[1], device=DEVICE, dtype=dtype)
    return x.movedim(-1, 1)


# ----------------------------------------------------------------------------------- the same work


def _folded(x: Tensor, weight: Tensor, shape: Shape, fold: Fold) -> tuple[Tensor, Tensor]:
    """Return input and weight as the folded convolution takes them."""
    if fold == PLAIN:
        return x, weight.contiguous(memory_format=torch.channels_last)
    if fold in (COLUMNS, MATMUL):
        flat = weight.permute(0, 2, 3, 1).flatten(1)
        padding = column_width(shape.fan_in, shape.kernel) - flat.shape[1]
        flat = torch.nn.functional.pad(flat, (0, padding))
        return columns(x, shape.kernel), flat[:, :, None, None]
    rows = x.permute(0, 2, 3, 1)
    if fold.channels:
        rows = torch.nn.functional.pad(rows, (0, fold.channels - shape.fan_in))
    group = shape.stride * fold.pixels
    grouped = rows.reshape(*rows.shape[:2], -1, group * rows.shape[3]).permute(0, 3, 1, 2)
    (weight,) = fold_weights(weight[None], shape.stride, fold)
    return grouped, weight


def _steps(shape: Shape, fold: Fold, weight: Tensor) -> tuple[list[int], list[int]]:
    """Return stride and padding of the folded convolution."""
    if fold == PLAIN:
        return [shape.stride] * 2, [shape.kernel // 2] * 2
    if fold in (COLUMNS, MATMUL):
        return [1, 1], [0, 0]
    return [shape.stride, 1], [weight.shape[2] // 2, weight.shape[3] // 2]


def _check(shape: Shape, pixels: int, fold: Fold) -> None:
    """Compare results and gradients of the folded convolution with the plain one's."""
    batch = min(32, BATCH)
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 1e-2)):
        x = draw(batch, shape.fan_in, pixels, pixels, dtype=dtype).requires_grad_()
        weight = draw(shape.fan_out, shape.fan_in, shape.kernel, shape.kernel, dtype=dtype)
        weight.requires_grad_()
        outcomes = []
        for leaves, way in (((x.double(), weight.double()), PLAIN), ((x, weight), fold)):
            y = _convolve(*leaves, shape, way)
            torch.manual_seed(1)
            dy = torch.randn(batch, *y.shape[1:], device=DEVICE).to(dtype).to(y.dtype)
            outcomes.append([y, *torch.autograd.grad(y, (x, weight), dy)])
        for name, right, result in zip(("y", "dx", "dw"), *outcomes, strict=True):
            error = relative_error(result, right)
            demand(error < tolerance, f"fold {shape} {fold} {dtype} {name}: {error}")


def _convolve(x: Tensor, weight: Tensor, shape: Shape, fold: Fold) -> Tensor:
    """Convolve one way; return the result as (N, O, H, W)."""
    x, weight = _folded(x, weight, shape, fold)
    y = torch.nn.functional.conv2d(x, weight, None, *_steps(shape, fold, weight))
    rows = y.permute(0, 2, 3, 1)
    return rows.reshape(*rows.shape[:2], -1, shape.fan_out).permute(0, 3, 1, 2)


# ------------------------------------------------------------------------------------------- times


def _measure(batch: int, shape: Shape, pixels: int, fold: Fold) -> dict[str, float]:
    """Time forward, dgrad and wgrad of one convolution; the first layer needs no dgrad."""
    weight = draw(shape.fan_out, shape.fan_in, shape.kernel, shape.kernel)
    result = 2 * batch * shape.fan_out * (pixels // shape.stride) ** 2
    xs = buffers(lambda: draw(batch, shape.fan_in, pixels, pixels), result)
    pairs = [_folded(x, weight, shape, fold) for x in xs]
    placed = pairs[0][1]
    steps = _steps(shape, fold, placed)
    inputs = [x for x, _ in pairs]
    if fold == MATMUL:
        return _matmul([x.permute(0, 2, 3, 1).flatten(0, 2) for x in inputs], placed.flatten(1))
    forward = partial(torch.ops.aten.convolution, weight=placed, bias=None, stride=steps[0])
    rest: Any = {"padding": steps[1], "dilation": [1, 1], "transposed": False}
    rest |= {"output_padding": [0, 0], "groups": 1}
    times = {"forward": milliseconds([partial(forward, x, **rest) for x in inputs])}
    y = forward(inputs[0], **rest)
    gradients = [torch.randn_like(y) for _ in inputs]

    def backward(mask: list[bool]) -> list[Callable[[], object]]:
        return [
            partial(
                *(torch.ops.aten.convolution_backward, dy, x, placed, None, steps[0]),
                *(steps[1], [1, 1], False, [0, 0], 1, mask),
            )
            for dy, x in zip(gradients, inputs, strict=True)
        ]

    if shape.fan_in != 3:
        times["dgrad"] = milliseconds(backward([True, False, False]))
    times["wgrad"] = milliseconds(backward([False, True, False]))
    return times


def _matmul(xs: list[Tensor], weight: Tensor) -> dict[str, float]:
    """Time the stem as a matrix product of columns."""
    gradients = [torch.randn(len(x), len(weight), dtype=x.dtype, device=DEVICE) for x in xs]
    pairs = list(zip(gradients, xs, strict=True))
    return {
        "forward": milliseconds([partial(torch.mm, x, weight.T) for x in xs]),
        "wgrad": milliseconds([partial(torch.mm, dy.T, x) for dy, x in pairs]),
    }


def _unfolding() -> float:
    """Time the unfolding of all weights of ResNet44 and its backward, as autocast does it."""
    model = fold_convolutions(resnet44().to(DEVICE))
    layers = [m for m in model.modules() if hasattr(m, "folded")]
    weights = [layer.weight for layer in layers]
    gradients: list[Tensor] = []

    def step() -> None:
        with torch.autocast(DEVICE, torch.bfloat16):
            _unfold_all(model, ())
        placed = [layer.folded for layer in layers]
        if not gradients:
            gradients.extend(torch.randn_like(weight) for weight in placed)
        torch.autograd.grad(placed, weights, gradients)
        _forget_all(model)

    return milliseconds([step])


def _flat_unfolding() -> float:
    """Time the same for flat weights: all that an update does after its backward."""
    flat = Flat(fold_convolutions(resnet44().to(DEVICE)))
    gradients = [torch.randn_like(leaf) for leaf in flat.leaves]
    rates, sums = torch.tensor([0.1, 0.9, 1e-4, 5.0], device=DEVICE), torch.zeros(3, device=DEVICE)
    loss = torch.zeros((), device=DEVICE)
    return milliseconds([partial(flat.step, gradients, rates, loss, sums)])
