"""Max pooling on the GPU: checked against PyTorch, timed against PyTorch and against its bytes."""

from functools import partial
from pathlib import Path
from typing import Any

import pool
import torch
from timing import (
    DEVICE,
    buffers,
    bytes_per_millisecond,
    demand,
    milliseconds,
    relative_error,
    show,
    write,
)
from torch import Tensor

BATCH = 4096 if DEVICE == "cuda" else 2
SHAPES: dict[str, list[tuple[int, int, int]]] = {  # (channels, pixels, kernel) of every pooling
    "vgg": [(64, 32, 2), (128, 16, 2), (256, 8, 2), (512, 4, 2), (512, 2, 2)],
    "c1": [(64, 32, 3), (64, 15, 3)],
}
SWEEP = [
    pool.Tuning(),
    pool.Tuning(pack=False),
    pool.Tuning(rounds=2),
    pool.Tuning(pack=False, rounds=2),
    pool.Tuning(pack=False, rounds=4),
    pool.Tuning(warps=8),
    pool.Tuning(warps=2),
    pool.Tuning(channels=128, warps=8),
]


def main(path: Path | None = None) -> None:
    """Check and time all shapes; sweep the settings on the largest ones."""
    per_millisecond = bytes_per_millisecond()
    for dtype in (torch.float32, torch.bfloat16):
        for channels, pixels, kernel in {shape for shapes in SHAPES.values() for shape in shapes}:
            _check(draw(min(64, BATCH), channels, pixels, dtype), kernel)
    results = [
        _measure(network, *shape, per_millisecond)
        for network, shapes in SHAPES.items()
        for shape in shapes
    ]
    swept = [_sweep(*shape) for shape in [(64, 32, 2), (256, 8, 2), (64, 32, 3), (64, 15, 3)]]
    write(path, {"GB/s": per_millisecond / 1e6, "results": results, "sweep": swept})
    for sweep in swept:
        print(sweep["shape"])
        show(["settings", "forward", "backward"], sweep["rows"])
    columns = ["forward", "backward", "PyTorch forward", "PyTorch backward", "limit"]
    rows = [[r["network"], r["shape"], *(r[c] for c in columns)] for r in results]
    for network in SHAPES:
        sums = [sum(r[c] for r in results if r["network"] == network) for c in columns]
        rows.append([network, "sum", *sums])
    print(f"milliseconds at batch {BATCH}, bf16; copy bandwidth {per_millisecond / 1e6:.0f} GB/s")
    show(["network", "channels, pixels, kernel", *columns], rows)


def draw(batch: int, channels: int, pixels: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """A batch of normal values in channels_last; in bf16 many of them tie."""
    x = torch.randn(batch, pixels, pixels, channels, device=DEVICE, dtype=dtype)
    return x.permute(0, 3, 1, 2)


def _check(x: Tensor, kernel: int) -> None:
    """Compare results and gradients with PyTorch's, bit for bit where no windows overlap."""
    outcomes = []
    for function in (partial(pool.max_pool2d, kernel=kernel), pytorch(kernel)):
        leaf = x.detach().requires_grad_()
        y = function(leaf)
        torch.manual_seed(1)
        dy = torch.randn_like(y)
        outcomes.append((y.detach(), *torch.autograd.grad(y, leaf, dy)))
    (y, dx), (exact, right) = outcomes
    name = f"pool {tuple(x.shape)} {x.dtype} kernel {kernel}"
    demand(pool.serves(x, kernel), f"{name}: not served by the kernels")
    demand(torch.equal(y, exact), f"{name}: results differ")
    if kernel == 2:
        demand(torch.equal(dx, right), f"{name}: gradients differ")
    else:
        error = relative_error(dx, right)
        demand(error < (1e-6 if x.dtype == torch.float32 else 4e-3), f"{name}: gradients {error}")


def pytorch(kernel: int) -> Any:
    """PyTorch's pooling as a function of the input."""
    return partial(torch.nn.functional.max_pool2d, kernel_size=kernel, stride=2)


def _measure(
    network: str, channels: int, pixels: int, kernel: int, per_millisecond: float
) -> dict[str, Any]:
    """Time forward and backward of ours and of PyTorch's on one shape."""
    xs = buffers(lambda: draw(BATCH, channels, pixels))
    y, index = pool.forward(xs[0], kernel)
    size = xs[0].numel() * 2
    moved = 2 * size + 2 * y.numel() * 2 + 2 * index.numel()
    result: dict[str, Any] = {
        "network": network,
        "shape": (channels, pixels, kernel),
        "limit": moved / per_millisecond,
    }
    result["forward"], result["backward"] = _ours(xs, kernel, None)
    forward = torch.ops.aten.max_pool2d_with_indices
    backward = torch.ops.aten.max_pool2d_with_indices_backward
    window = ([kernel, kernel], [2, 2], [0, 0], [1, 1], False)
    result["PyTorch forward"] = milliseconds([partial(forward, x, *window) for x in xs])
    saved = [(torch.randn_like(y), x, forward(x, *window)[1]) for x in xs]
    result["PyTorch backward"] = milliseconds(
        [partial(backward, dy, x, *window, places) for dy, x, places in saved]
    )
    return result


def _ours(xs: list[Tensor], kernel: int, settings: pool.Tuning | None) -> tuple[float, float]:
    """Time our forward and backward."""
    pack = pool.packing(kernel, settings or pool.tuning(kernel, xs[0].shape[1]))
    ahead = milliseconds([partial(pool.forward, x, kernel, settings=settings) for x in xs])
    saved = [pool.forward(x, kernel, settings=settings) for x in xs]
    size = (xs[0].shape[2], xs[0].shape[3])
    options: Any = {"size": size, "kernel": kernel, "pack": pack, "settings": settings}
    back = milliseconds(
        [partial(pool.backward, torch.randn_like(y), index, **options) for y, index in saved]
    )
    return ahead, back


def _sweep(channels: int, pixels: int, kernel: int) -> dict[str, Any]:
    """Time all settings on one shape."""
    xs = buffers(lambda: draw(BATCH, channels, pixels))
    rows = []
    for settings in SWEEP:
        name = f"warps {settings.warps} rounds {settings.rounds} channels {settings.channels}"
        name += " packed" if settings.pack else ""
        rows.append([name, *_ours(xs, kernel, settings)])
    return {"shape": (channels, pixels, kernel), "rows": rows}
