"""The norm with a residual on the GPU: two gradients added before it or inside it, and settings."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from joined import BACKEND, backward, settings_for
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

from ghostbatch.ops.backends.base import NormCall

BATCH = 4096 if DEVICE == "cuda" else 4
GHOST = 128 if DEVICE == "cuda" else 2
SHAPES = [(16, 32), (64, 32)] if DEVICE == "cuda" else [(16, 4)]


def main(path: Path | None = None) -> None:
    """Check and time all shapes."""
    per_millisecond = bytes_per_millisecond()
    results = []
    for channels, pixels in SHAPES:
        results.append(_measure(channels, pixels, per_millisecond))
        write(path, {"GB/s": per_millisecond / 1e6, "results": results})
    print("backward with residual and ReLU and two gradients: milliseconds, bf16, channels_last")
    names = list(results[0]["milliseconds"])
    rows = [[name, *(r["milliseconds"][name] for r in results)] for name in names]
    show(["", *(str(r["shape"]) for r in results)], rows)


def draw(channels: int, pixels: int) -> Tensor:
    """A batch of normal values in channels_last."""
    size = (BATCH, pixels, pixels, channels)
    return torch.randn(size, device=DEVICE, dtype=torch.bfloat16).permute(0, 3, 1, 2)


def _measure(channels: int, pixels: int, per_millisecond: float) -> dict[str, Any]:
    """Time the backward of one shape, in all ways."""
    make = partial(draw, channels, pixels)
    xs = buffers(make)
    BACKEND.prepare(xs[0].device)
    weight, bias = (torch.rand(channels, device=DEVICE) for _ in range(2))
    rows = []
    for x in xs:
        call = NormCall(x, weight, bias, GHOST, 1e-5, "relu", make())
        y, statistics = BACKEND.forward(call)
        rows.append((call._replace(residual=None), statistics, make(), make(), y))

    def separate(call: NormCall, table: Tensor, dy: Tensor, other: Tensor, y: Tensor) -> Any:
        return BACKEND.backward(call, table, dy + other, y)

    dx, _, dresidual = separate(*rows[0])
    found = backward(*rows[0])
    for name, mine, exact in (("dx", found[0], dx), ("dresidual", found[1], dresidual)):
        error = relative_error(mine, exact)  # type: ignore[arg-type]
        demand(error < 5e-3, f"joined norm {channels} {pixels} {name}: {error}")
    chosen = settings_for(rows[0][0], residual=True)
    times = {"add before": _time(separate, rows)}
    for lookahead in (66, 132, 264):
        settings = replace(chosen, lookahead=lookahead)
        times[f"joined, lookahead {lookahead}"] = _time(partial(backward, settings=settings), rows)
    for name, settings in {
        "2 vectors, 96 registers": replace(chosen, vectors=2, subtiles=8, registers=96),
        "2 subtiles": replace(chosen, subtiles=2),
        "160 registers": replace(chosen, registers=160),
    }.items():
        times[f"joined, {name}"] = _time(partial(backward, settings=settings), rows)
    times["limit"] = 6 * 2 * xs[0].numel() / per_millisecond
    return {"shape": [channels, pixels], "chosen": str(chosen), "milliseconds": times}


def _time(step: Any, rows: Any) -> float:
    return milliseconds([partial(step, *row) for row in rows])
