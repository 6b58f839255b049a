"""The norm with a residual on the GPU: two gradients added before it or inside it, and settings."""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from ghostbatch.ops.counters import make_store
from ghostbatch.ops.tiling import Tuning, tuning
from joined import backward
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

from ghostbatch import GhostBatchNorm2d
from ghostbatch.ops import fused

BATCH = 4096 if DEVICE == "cuda" else 4
GHOST = 128 if DEVICE == "cuda" else 2
SHAPES = [(16, 32), (64, 8), (64, 32)] if DEVICE == "cuda" else [(16, 4)]


def main() -> None:
    """Check and time all shapes."""
    per_millisecond = bytes_per_millisecond()
    results = []
    for channels, pixels in SHAPES:
        results.append(_measure(channels, pixels, per_millisecond))
        write("norm", {"GB/s": per_millisecond / 1e6, "results": results})
    print("milliseconds, bf16, channels_last, residual and ReLU")
    names = list(results[0]["milliseconds"])
    rows = [[name, *(r["milliseconds"][name] for r in results)] for name in names]
    show(["", *(str(r["shape"]) for r in results)], rows)


def draw(channels: int, pixels: int) -> Tensor:
    """A batch of normal values in channels_last."""
    size = (BATCH, pixels, pixels, channels)
    return torch.randn(size, device=DEVICE, dtype=torch.bfloat16).permute(0, 3, 1, 2)


def _measure(channels: int, pixels: int, per_millisecond: float) -> dict[str, Any]:
    """Time forward and backward with a residual on one shape."""
    make_store(torch.device(DEVICE, 0) if DEVICE == "cuda" else torch.device(DEVICE))
    layer = GhostBatchNorm2d(channels, GHOST).to(DEVICE)
    weight, bias = layer.weight.detach(), layer.bias.detach()
    make = partial(draw, channels, pixels)
    xs = buffers(make)
    residuals, dys, others = ([make() for _ in xs] for _ in range(3))

    def ahead(x: Tensor, residual: Tensor, settings: Tuning | None = None) -> Any:
        return fused.forward(x, weight, bias, GHOST, 1e-5, "relu", residual, None, settings)

    saved = [ahead(x, residual) for x, residual in zip(xs, residuals, strict=True)]
    rows = list(zip(dys, others, xs, saved, strict=True))

    def separate(dy: Tensor, other: Tensor, x: Tensor, y: Tensor, table: Tensor) -> Any:
        return fused.backward(dy + other, x, weight, table, GHOST, "relu", bias, y)

    dy, other, x, (y, table) = rows[0]
    right = separate(dy.double().add(other).to(dy.dtype), torch.zeros_like(dy), x, y, table)
    found = backward(layer, dy, other, x, table, y)
    for name, mine, exact in zip(("dx", "dresidual"), found, (right[0], right[2]), strict=False):
        error = relative_error(mine, exact)  # type: ignore[arg-type]
        demand(error < 1e-2, f"joined norm {channels} {pixels} {name}: {error}")
    chosen = tuning(tuple(x.shape), x.dtype, False, True, GHOST)
    forward_chosen = tuning(tuple(x.shape), x.dtype, False, False, GHOST)
    times = {
        "forward, as landed": _time(ahead, zip(xs, residuals, strict=True)),
        "forward, 4 vectors, 4 subtiles": _time(
            partial(ahead, settings=replace(forward_chosen, vectors=4, subtiles=4)),
            zip(xs, residuals, strict=True),
        ),
        "forward, limit": 3 * 2 * x.numel() / per_millisecond,
        "backward, add before": _time(separate, [(d, o, x, *s) for d, o, x, s in rows]),
    }
    for name, settings in {
        "as landed": chosen,
        "4 vectors, 4 subtiles, 128 registers": replace(
            chosen, vectors=4, subtiles=4, registers=128
        ),
        "4 vectors, 4 subtiles, 160 registers": replace(
            chosen, vectors=4, subtiles=4, registers=160
        ),
    }.items():
        times[f"backward, joined, {name}"] = _time(
            partial(backward, layer, settings=settings),
            [(d, o, x, s[1], s[0]) for d, o, x, s in rows],
        )
    times["backward, limit of joined"] = 6 * 2 * x.numel() / per_millisecond
    return {"shape": [channels, pixels], "milliseconds": times}


def _time(step: Any, arguments: Any) -> float:
    return milliseconds([partial(step, *row) for row in arguments])
