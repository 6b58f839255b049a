"""Times of GPU work: CUDA graphs replayed between events, medians, and a table at the end."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
"""Without a GPU the scripts run through in Triton's interpreter, on tiny sizes."""

COLD = 256 << 20 if DEVICE == "cuda" else 1
"""Bytes that a timed sequence touches at least, several times the L2 cache."""


def milliseconds(steps: Sequence[Callable[[], object]], turns: int = 11) -> float:
    """Return the median time of one step, with all ``steps`` captured in one graph.

    The steps should do the same work on different buffers, so that none finds its input in the
    cache.
    """
    if DEVICE == "cpu":
        start = perf_counter()
        for step in steps:
            step()
        return 1e3 * (perf_counter() - start) / len(steps)
    graph = captured(lambda: [step() for step in steps])
    per_turn = max(1, round(4.0 / max(_replay(graph, 1), 0.01)))
    return median(_replay(graph, per_turn) for _ in range(turns)) / len(steps)


def captured(step: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """Run a step twice to warm it up, then capture it.

    Both happen on one side stream: autograd remembers on which stream it first met a parameter, and
    a capture must not depend on any other.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        step()
    graph.replay()
    torch.cuda.synchronize()
    return graph


def _replay(graph: torch.cuda.CUDAGraph, times: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(times):
        graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / times


def buffers(make: Callable[[], Tensor], others: int = 0) -> list[Tensor]:
    """Make 2 to 16 inputs; steps on all of them together touch several times the L2 cache.

    ``others`` counts the bytes that a step touches besides its input.
    """
    first = make()
    touched = first.numel() * first.element_size() + others
    count = min(16, max(2, -(-COLD // touched)))
    return [first, *(make() for _ in range(count - 1))]


def bytes_per_millisecond() -> float:
    """Return the bandwidth of a pass from one tensor to another, counting both."""
    count = 1 << 28 if DEVICE == "cuda" else 1 << 18
    source, target = (torch.randn(count, device=DEVICE) for _ in range(2))
    return 8 * count / milliseconds([lambda: torch.neg(source, out=target)])  # a kernel, no memcpy


def relative_error(result: Tensor, exact: Tensor) -> float:
    """Return the norm of the error over the norm of the exact value."""
    exact = exact.detach().double()
    return float((result.detach().double() - exact).norm() / exact.norm())


def demand(fine: bool, message: str) -> None:
    """Abort loudly unless a check holds."""
    if not fine:
        raise SystemExit(f"WRONG RESULT: {message}")


def write(path: Path | None, report: dict[str, Any]) -> None:
    """Write a report as JSON, if there is a path."""
    gpu = torch.cuda.get_device_name() if DEVICE == "cuda" else None
    machine = {"gpu": gpu, "torch": torch.__version__}
    if path is not None:
        path.write_text(json.dumps(machine | report, indent=1))


def show(header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table."""
    cells = [[*header], *([_text(cell) for cell in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    for row in cells:
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))


def _text(cell: object) -> str:
    if isinstance(cell, float):
        return f"{cell:.4f}" if cell < 100 else f"{cell:,.0f}"
    return "-" if cell is None else str(cell)
