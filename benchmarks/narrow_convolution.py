"""Kernels for 3x3 convolutions of few channels, against cuDNN's: a candidate for the engine.

    python benchmarks/narrow_convolution.py --json FILE
    TRITON_INTERPRET=1 python benchmarks/narrow_convolution.py --check  # on a CPU, without times

In channels_last memory the pixels of a row lie side by side, so a group of f output pixels needs
three stretches of memory, one in each row: f pixels and a few on either side. A program multiplies
the stretches of M groups by three weights (window, f C), in which every tap stands f times. cuDNN
folded (`ghostbatch.nn.fold`) multiplies twice as many zeros, and unfolded it fills its matrix units
with fewer channels than they take. The gradient of the input is the same product with other
weights. That of the weight is a product of the stretches with dy, summed over groups.

Prints milliseconds of forward, input gradient and weight gradient, each beside cuDNN's (the faster
of folded and plain) and beside the limit: the bytes of both images at the measured copy bandwidth.
Shapes are those of ResNet44 at batch 4096, in bf16.
"""

import argparse
import itertools
import json
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from math import inf
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from ghostbatch.nn.fold import fold_weight

SHAPES = [(4096, 16, 32), (4096, 32, 16)]  # N, C, and both sides of the image
FOLDS = {16: 4, 32: 2}
"""Pixels of a group that are fastest with cuDNN."""


class Settings(NamedTuple):
    """How the work is cut."""

    pixels: int
    """Output pixels of a group: f."""
    M: int
    """Groups that are multiplied at once."""
    warps: int
    stages: int
    tiles: int
    """Blocks of M groups that a program works through."""


@triton.jit
def _stretch(
    x_ptr, group_M, row, W: tl.constexpr, H: tl.constexpr, C: tl.constexpr,
    PIXELS: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Load the pixels around each group in the row above (-1), its own (0) or the one below (1)."""
    K: tl.constexpr = WINDOW * C
    LEAD: tl.constexpr = (WINDOW - PIXELS) // 2
    across: tl.constexpr = W // PIXELS
    at_K = tl.arange(0, K)
    pixel_MK = (group_M % across * PIXELS - LEAD)[:, None] + (at_K // C)[None, :]
    line_M = group_M // across % H + row
    keep_MK = (pixel_MK >= 0) & (pixel_MK < W) & ((line_M >= 0) & (line_M < H))[:, None]
    start_M = (group_M + row * across) * (PIXELS * C) - LEAD * C
    return tl.load(x_ptr + start_M[:, None] + at_K[None, :], keep_MK, other=0.0)


@triton.jit
def image_kernel(
    x_ptr,  # (N, H, W, C)
    weight_ptr,  # (3, WINDOW C, PIXELS C), from `placed`
    y_ptr,  # (N, H, W, C)
    W: tl.constexpr, H: tl.constexpr, C: tl.constexpr, PIXELS: tl.constexpr, WINDOW: tl.constexpr,
    M: tl.constexpr, TILES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Convolve: forward, or the gradient of the input."""
    K: tl.constexpr = WINDOW * C
    L: tl.constexpr = PIXELS * C
    at_L = tl.arange(0, L)
    at_KL = tl.arange(0, K)[:, None] * L + at_L[None, :]
    above_KL = tl.load(weight_ptr + at_KL)
    own_KL = tl.load(weight_ptr + K * L + at_KL)
    below_KL = tl.load(weight_ptr + 2 * K * L + at_KL)
    first = tl.program_id(0) * TILES
    for tile in tl.range(first, first + TILES, num_stages=STAGES):
        group_M = tile * M + tl.arange(0, M)
        x_MK = _stretch(x_ptr, group_M, -1, W, H, C, PIXELS, WINDOW)
        sum_ML = tl.dot(x_MK, above_KL)
        x_MK = _stretch(x_ptr, group_M, 0, W, H, C, PIXELS, WINDOW)
        sum_ML = tl.dot(x_MK, own_KL, sum_ML)
        x_MK = _stretch(x_ptr, group_M, 1, W, H, C, PIXELS, WINDOW)
        sum_ML = tl.dot(x_MK, below_KL, sum_ML)
        y_ML = sum_ML.to(y_ptr.dtype.element_ty)
        tl.store(y_ptr + group_M[:, None] * L + at_L[None, :], y_ML)


@triton.jit
def weight_kernel(
    x_ptr,  # (N, H, W, C), as is dy
    dy_ptr,
    partial_ptr,  # (programs, 3, WINDOW C, PIXELS C)
    W: tl.constexpr, H: tl.constexpr, C: tl.constexpr, PIXELS: tl.constexpr, WINDOW: tl.constexpr,
    M: tl.constexpr, TILES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Add up the products of the stretches with dy over the groups of this program."""
    K: tl.constexpr = WINDOW * C
    L: tl.constexpr = PIXELS * C
    at_L = tl.arange(0, L)
    above_KL = tl.zeros((K, L), tl.float32)
    own_KL = tl.zeros((K, L), tl.float32)
    below_KL = tl.zeros((K, L), tl.float32)
    first = tl.program_id(0) * TILES
    for tile in tl.range(first, first + TILES, num_stages=STAGES):
        group_M = tile * M + tl.arange(0, M)
        dy_ML = tl.load(dy_ptr + group_M[:, None] * L + at_L[None, :])
        x_MK = _stretch(x_ptr, group_M, -1, W, H, C, PIXELS, WINDOW)
        above_KL = tl.dot(tl.trans(x_MK), dy_ML, above_KL)
        x_MK = _stretch(x_ptr, group_M, 0, W, H, C, PIXELS, WINDOW)
        own_KL = tl.dot(tl.trans(x_MK), dy_ML, own_KL)
        x_MK = _stretch(x_ptr, group_M, 1, W, H, C, PIXELS, WINDOW)
        below_KL = tl.dot(tl.trans(x_MK), dy_ML, below_KL)
    at_KL = tl.arange(0, K)[:, None] * L + at_L[None, :]
    partial_ptr += tl.program_id(0) * 3 * K * L
    tl.store(partial_ptr + at_KL, above_KL)
    tl.store(partial_ptr + K * L + at_KL, own_KL)
    tl.store(partial_ptr + 2 * K * L + at_KL, below_KL)


def window(pixels: int) -> int:
    """Return the pixels of a stretch for groups of so many: a power of two."""
    return 1 << (pixels + 1).bit_length()


def placed(weight: Tensor, pixels: int) -> Tensor:
    """Return a weight (O, I, 3, 3) as three products: (3, window I, pixels O)."""
    fan_out, fan_in, _, _ = weight.shape
    lead = (window(pixels) - pixels) // 2
    table = weight.new_zeros(3, window(pixels), fan_in, pixels, fan_out)
    for pixel, tap in itertools.product(range(pixels), range(3)):
        table[:, pixel + tap + lead - 1, :, pixel] = weight[:, :, :, tap].permute(2, 1, 0)
    return table.reshape(3, window(pixels) * fan_in, pixels * fan_out)


def gathered(table: Tensor, pixels: int) -> Tensor:
    """Return the gradient of a weight (O, I, 3, 3) from that of what `placed` returns."""
    lead = (window(pixels) - pixels) // 2
    table = table.unflatten(2, (pixels, -1)).unflatten(1, (window(pixels), -1))
    taps = [
        sum(table[:, pixel + tap + lead - 1, :, pixel] for pixel in range(pixels))
        for tap in range(3)
    ]
    return torch.stack(taps, -1).permute(2, 1, 0, 3)


def _sizes(x: Tensor, settings: Settings) -> tuple[int, dict[str, Any]]:
    """Return the programs, and the arguments that both kernels share."""
    N, C, H, W = x.shape
    groups = N * H * W // settings.pixels
    programs, rest = divmod(groups, settings.M * settings.tiles)
    if rest:
        raise ValueError(f"{groups} groups are not a multiple of {settings.M * settings.tiles}")
    sizes = {"W": W, "H": H, "C": C, "PIXELS": settings.pixels, "WINDOW": window(settings.pixels)}
    sizes |= {"M": settings.M, "TILES": settings.tiles, "STAGES": settings.stages}
    return programs, {**sizes, "num_warps": settings.warps}


def convolve(x: Tensor, weight: Tensor, settings: Settings, y: Tensor | None = None) -> Tensor:
    """Convolve images in channels_last with a weight from `placed`."""
    y = torch.empty_like(x) if y is None else y
    programs, sizes = _sizes(x, settings)
    image_kernel[(programs,)](x, weight, y, **sizes)
    return y


def weight_gradient(x: Tensor, dy: Tensor, settings: Settings) -> Tensor:
    """Return the gradient of what `placed` returns, in fp32."""
    programs, sizes = _sizes(x, settings)
    width = x.shape[1]
    shape = (programs, 3, sizes["WINDOW"] * width, sizes["PIXELS"] * width)
    partial = torch.empty(shape, dtype=torch.float32, device=x.device)
    weight_kernel[(programs,)](x, dy, partial, **sizes)
    return partial.sum(0)


def flipped(weight: Tensor) -> Tensor:
    """Return the weight with which a convolution of dy is the gradient of the input."""
    return weight.flip(2, 3).transpose(0, 1)


def check(shape: tuple[int, int, int], settings: Settings, device: str) -> float:
    """Return the largest relative error of the three products against fp64."""
    x, dy, weight = draw(shape, device)
    exact = [t.double().requires_grad_() for t in (x, weight)]
    y = F.conv2d(*exact, padding=1)
    dx, dweight = torch.autograd.grad(y, exact, dy.double())
    pixels = settings.pixels
    found = (
        convolve(x, placed(weight, pixels), settings),
        convolve(dy, placed(flipped(weight), pixels), settings),
        gathered(weight_gradient(x, dy, settings), pixels),
    )
    pairs = zip(found, (y, dx, dweight), strict=True)
    return max(float((a.double() - b).detach().norm() / b.detach().norm()) for a, b in pairs)


def draw(shape: tuple[int, int, int], device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return random x, dy and weight, images in channels_last; in bf16 on a GPU.

    Triton's interpreter multiplies no bf16.
    """
    N, C, side = shape
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    x, dy = (torch.randn(N, C, side, side, device=device, dtype=dtype) for _ in range(2))
    weight = torch.randn(C, C, 3, 3, device=device, dtype=dtype) / (9 * C) ** 0.5
    x, dy = (t.to(memory_format=torch.channels_last) for t in (x, dy))
    return x, dy, weight


def milliseconds(run: Callable[[], object]) -> float:
    """Return the median time of a call on the GPU."""
    run()
    torch.cuda.synchronize()
    times = []
    for _ in range(9):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return median(times)


def candidates(shape: tuple[int, int, int]) -> list[Settings]:
    """Return the settings to try for a shape."""
    N, C, side = shape
    grid = itertools.product((2, 4), (64, 128, 256), (4, 8), ((1, 1), (1, 8), (2, 8), (3, 8)))
    every = [Settings(*sizes, stages, tiles) for *sizes, (stages, tiles) in grid]
    fits = [s for s in every if s.pixels * C <= 64]  # the weights of more fill shared memory
    return [s for s in fits if N * side * side // s.pixels % (s.M * s.tiles) == 0]


def compile_kernels(job: tuple[tuple[int, int, int], Settings]) -> None:
    """Compile both kernels, which Triton keeps on disk."""
    (_, C, side), settings = job
    x, dy, weight = draw((1, C, side), "cuda")
    _, sizes = _sizes(x.expand(4096, -1, -1, -1), settings)
    table = placed(weight, settings.pixels)
    image_kernel.warmup(x, table, dy, grid=(1,), **sizes)
    weight_kernel.warmup(x, dy, table.float(), grid=(1,), **sizes)


def cudnn(shape: tuple[int, int, int]) -> dict[str, float]:
    """Return cuDNN's milliseconds: the faster of folded and plain for each product."""
    N, C, side = shape
    x, dy, weight = draw(shape, "cuda")
    wanted = {"input": (True, False, False), "weight": (False, True, False)}
    times: dict[str, list[float]] = {"forward": [], "input": [], "weight": []}
    for pixels in (1, FOLDS[C]):
        line = (N, side, side // pixels, pixels * C)
        a, b = (t.permute(0, 2, 3, 1).reshape(line).permute(0, 3, 1, 2) for t in (x, dy))
        table = weight if pixels == 1 else fold_weight(weight, 1, pixels)
        table = table.contiguous(memory_format=torch.channels_last)
        times["forward"].append(milliseconds(partial(F.conv2d, a, table, padding=1)))
        where = (None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
        for name, mask in wanted.items():
            backward = partial(torch.ops.aten.convolution_backward, b, a, table, *where, mask)
            times[name].append(milliseconds(backward))
    return {name: min(each) for name, each in times.items()}


def measure(shape: tuple[int, int, int], per_byte: float) -> dict[str, Any]:
    """Return the best settings and times of each product for a shape."""
    x, dy, weight = draw(shape, "cuda")
    y = torch.empty_like(x)
    unknown: tuple[float, Settings | None] = (inf, None)
    best = {"forward": unknown, "weight": unknown}
    for settings in candidates(shape):
        table = placed(weight, settings.pixels)
        runs = {
            "forward": partial(convolve, x, table, settings, y),
            "weight": partial(weight_gradient, x, dy, settings),
        }
        for name, run in runs.items():
            try:
                best[name] = min(best[name], (milliseconds(run), settings), key=lambda b: b[0])
            except triton.OutOfResources:
                continue
    limit = per_byte * 2 * x.numel() * x.element_size()
    theirs = cudnn(shape)
    found = {name: {"ms": ms, "settings": s and s._asdict()} for name, (ms, s) in best.items()}
    chosen = [s for _, s in best.values() if s is not None]
    errors = [check((64, *shape[1:]), s._replace(tiles=1), "cuda") for s in chosen]
    return {"shape": shape, "limit ms": limit, "cuDNN ms": theirs, "errors": errors, **found}


def main() -> None:
    """Check on a CPU, or measure on a GPU and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="only compare with fp64, on a CPU")
    parser.add_argument("--json", type=Path, help="write all figures here")
    options = parser.parse_args()
    if options.check:
        for channels, pixels in itertools.product((16, 32), (2, 4)):
            error = check((2, channels, 8), Settings(pixels, 16, 4, 1, 2), "cpu")
            print(f"{channels} channels, groups of {pixels}: relative error {error:.1e}")
        return
    torch.backends.cudnn.benchmark = True
    source = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    per_byte = milliseconds(lambda: target.copy_(source)) / 2**31
    jobs = [(shape, settings) for shape in SHAPES for settings in candidates(shape)]
    with ProcessPoolExecutor(12, mp_context=get_context("spawn")) as pool:
        list(pool.map(compile_kernels, jobs))
    results = [measure(shape, per_byte) for shape in SHAPES]
    if options.json:
        gpu = torch.cuda.get_device_name()
        options.json.write_text(json.dumps({"gpu": gpu, "results": results}, indent=1) + "\n")
    print("shape              limit    forward  cuDNN   (input)   weight  cuDNN   settings")
    for r in results:
        theirs, ours = r["cuDNN ms"], (r["forward"], r["weight"])
        print(
            f"{r['shape']!s:<18} {r['limit ms']:.3f} {ours[0]['ms']:9.3f} {theirs['forward']:7.3f} "
            f"{theirs['input']:7.3f} {ours[1]['ms']:10.3f} {theirs['weight']:7.3f}   "
            f"{list(ours[0]['settings'].values())} {list(ours[1]['settings'].values())} "
            f"errors {r['errors']}"
        )


if __name__ == "__main__":
    main()
