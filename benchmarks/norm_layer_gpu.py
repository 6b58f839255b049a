"""Ghost norm on a GPU against its peers, as `norm_layer.py --device cuda` runs it.

Forward and backward of each variant are captured in one CUDA graph, so that what is timed is the
GPU's work and not Python's; the graphs are replayed in turns, and medians are compared. The limit
is what the bytes that must cross device memory take at the copy bandwidth measured in the same run:
five passes over the tensor (read x, write y; read x and dy, write dx), eight with a residual.
"""

import gc
from collections.abc import Callable, Iterator
from math import prod
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from norm_layer import GHOST, Loop, PlainCode
from torch import Tensor, nn

from ghostbatch import GhostBatchNorm2d
from ghostbatch.ops import ghost_batch_norm

Case = tuple[tuple[int, ...], torch.dtype, str]
Step = Callable[[], object]

SHAPES = [(16, 32, 32), (32, 16, 16), (64, 8, 8), (64, 32, 32), (256, 8, 8)]
HEADLINE: list[Case] = [((4096, *s), torch.bfloat16, "channels_last") for s in SHAPES]
OTHERS: list[Case] = [
    ((4096, *s), dtype, layout)
    for dtype in (torch.bfloat16, torch.float16, torch.float32)
    for layout in ("channels_last", "contiguous")
    for s in SHAPES
    if (dtype, layout) != (torch.bfloat16, "channels_last")
]
TURNS = 15
AT_LEAST = 2.0
"""Milliseconds that one timing lasts; short graphs are replayed several times."""


class Ghost(nn.Module):
    """Our layer with residual and ReLU fused into it."""

    def __init__(self, channels: int, activation: str | None) -> None:
        super().__init__()
        self.norm, self.activation = GhostBatchNorm2d(channels, GHOST), activation

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return relu(norm(x) + residual)."""
        norm = self.norm
        buffers = (norm.running_mean, norm.running_var, norm.weight, norm.bias)
        options: Any = {"activation": self.activation, "residual": residual, "ghost": GHOST}
        return ghost_batch_norm(
            x, *buffers, num_batches_tracked=norm.num_batches_tracked, **options
        )


class Plain(nn.Module):
    """nn.BatchNorm2d with the same residual and ReLU."""

    def __init__(self, channels: int, activation: str | None) -> None:
        super().__init__()
        self.norm, self.activation = nn.BatchNorm2d(channels), activation

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return relu(norm(x) + residual)."""
        y = self.norm(x)
        y = y if residual is None else y + residual
        return F.relu(y) if self.activation else y


def variants(channels: int, compiled: bool) -> Iterator[tuple[str, nn.Module, bool]]:
    """Yield name, layer, and whether it takes a residual."""
    yield "ghostbatch", GhostBatchNorm2d(channels, GHOST), False
    yield "BatchNorm", nn.BatchNorm2d(channels), False
    yield "loop over chunks", Loop(nn.BatchNorm2d(channels)), False
    yield "ghostbatch + ReLU", Ghost(channels, "relu"), False
    yield "BatchNorm + ReLU", Plain(channels, "relu"), False
    yield "ghostbatch + residual + ReLU", Ghost(channels, "relu"), True
    yield "BatchNorm + residual + ReLU", Plain(channels, "relu"), True
    if compiled:
        compiler = torch.compile(dynamic=False)
        yield "BatchNorm compiled", compiler(nn.BatchNorm2d(channels)), False
        yield "BatchNorm + ReLU compiled", compiler(Plain(channels, "relu")), False
        yield "plain code compiled", compiler(PlainCode(channels)), False


def report(compiled: bool, show: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Measure all cases; return them, with geometric means over the headline's five shapes."""
    per_byte = milliseconds_per_byte()
    results = []
    for number, case in enumerate(HEADLINE + OTHERS):
        torch._dynamo.reset()
        results.append(measure(case, compiled and number < len(HEADLINE), per_byte))
        show(results[-1])
    ours = "ghostbatch"
    means = {
        "x limit": geometric(r["milliseconds"][ours] / r["limit"] for r in results[:5]),
        **{
            f"x faster than {peer}": geometric(
                r["milliseconds"][peer] / r["milliseconds"][ours] for r in results[:5]
            )
            for peer in results[0]["milliseconds"]
            if not peer.startswith(ours) and "ReLU" not in peer
        },
    }
    slowest = min(results, key=lambda r: r["milliseconds"]["BatchNorm"] / r["milliseconds"][ours])
    worst = slowest["milliseconds"]["BatchNorm"] / slowest["milliseconds"][ours]
    return {
        "copy GB/s": round(1e-6 / per_byte),
        "geometric means, bf16 channels_last": {k: round(v, 3) for k, v in means.items()},
        "least x faster than BatchNorm, any case": round(worst, 3),
        "results": results,
    }


def measure(case: Case, compiled: bool, per_byte: float) -> dict[str, Any]:
    """Return the median milliseconds of a replay and the peak memory of every variant."""
    shape, dtype, layout = case
    kind = torch.channels_last if layout == "channels_last" else torch.contiguous_format
    x, dy, residual = (
        torch.randn(shape, device="cuda", dtype=dtype).contiguous(memory_format=kind)
        for _ in range(3)
    )
    size = prod(shape) * dtype.itemsize
    graphs, memory = {}, {}
    for name, layer, adds in variants(shape[1], compiled):
        step = training_step(layer.cuda(), x, dy, residual if adds else None)
        if "compiled" not in name:
            memory[name] = round(peak(step) / size, 4)
        graphs[name] = captured(step)
    times = {name: round(spent, 5) for name, spent in in_turns(graphs).items()}
    return {
        "shape": list(shape),
        "dtype": str(dtype).removeprefix("torch."),
        "layout": layout,
        "milliseconds": times,
        "limit": round(5 * size * per_byte, 5),
        "limit with residual": round(8 * size * per_byte, 5),
        "peak memory, in tensors": memory,
    }


def training_step(layer: nn.Module, x: Tensor, dy: Tensor, residual: Tensor | None) -> Step:
    """Return a step: forward and backward, from detached leaves."""
    leaves = [t.detach().requires_grad_() for t in (x, residual) if t is not None]
    wanted = [*leaves, *layer.parameters()]
    return lambda: torch.autograd.grad(layer(*leaves), wanted, dy)


def peak(step: Step) -> int:
    """Return the peak memory of a step beyond its inputs, in bytes."""
    step()
    torch.cuda.synchronize()
    gc.collect()  # or garbage would be freed during the measurement
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def captured(step: Step) -> torch.cuda.CUDAGraph:
    """Return the step as a graph, after a warm-up."""
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


def in_turns(graphs: dict[str, torch.cuda.CUDAGraph]) -> dict[str, float]:
    """Return the median milliseconds of each graph; they take turns, so slow moments hit all."""
    counts = {name: max(1, round(AT_LEAST / clock(graph, 3))) for name, graph in graphs.items()}
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(TURNS):
        for name, graph in graphs.items():
            times[name].append(clock(graph, counts[name]))
    return {name: median(spent) for name, spent in times.items()}


def clock(graph: torch.cuda.CUDAGraph, count: int) -> float:
    """Return the milliseconds of one replay among ``count`` in a row."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    begin.record()
    for _ in range(count):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / count


def milliseconds_per_byte() -> float:
    """Return the milliseconds per byte of a large copy, counting reads and writes.

    Not in a graph, where a copy was a third slower.
    """
    large = torch.empty(1 << 28, dtype=torch.float32, device="cuda").normal_()
    target = torch.empty_like(large)
    spent = []
    for _ in range(13):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        target.copy_(large)
        end.record()
        torch.cuda.synchronize()
        spent.append(float(begin.elapsed_time(end)))
    return median(spent[3:]) / (2 * large.numel() * 4)


def geometric(values: Iterator[float]) -> float:
    """Return the geometric mean."""
    several = list(values)
    return float(prod(several) ** (1 / len(several)))


def show(result: dict[str, Any]) -> None:
    """Print the lines of a table for one shape."""
    times, memory = result["milliseconds"], result["peak memory, in tensors"]
    shape = ",".join(map(str, result["shape"]))
    print(f"({shape}) {result['dtype']} {result['layout']}  limit {result['limit']:.3f} ms")
    for name, spent in times.items():
        limit = result["limit with residual" if "residual" in name else "limit"]
        kept = f"  peak {memory[name]:.2f} tensors" if name in memory else ""
        print(f"  {name:<30} {spent:8.4f} ms {spent / limit:6.2f} x limit{kept}", flush=True)
