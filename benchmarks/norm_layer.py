"""Forward + backward of ghost batch norm against its peers, in one run.

    python benchmarks/norm_layer.py                      # this CPU, 2 threads
    python benchmarks/norm_layer.py --device cuda        # this GPU: see norm_layer_gpu.py
    python benchmarks/norm_layer.py --json results/norm_layer/cpu.json

Variants take turns, one call each, in random order, and medians are compared, so that slow moments
and cache contents affect all alike. Compiled variants take turns among themselves. On a CPU the
allocator keeps freed memory: otherwise the page faults of fresh outputs, the same for all variants,
would hide the rest. The addresses of a process's memory matter too, so everything is measured in
several processes; ratios are medians over them, with the smallest and the largest.
"""

import argparse
import ctypes
import importlib.util
import json
import platform
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from ghostbatch import GhostBatchNorm1d, GhostBatchNorm2d, __version__

GHOST = 128
PEERS = ("BatchNorm", "loop over chunks")
Case = tuple[tuple[int, ...], torch.dtype, str]

CPU_CASES: list[Case] = [
    ((2048, 64, 8, 8), torch.float32, "contiguous"),
    ((2048, 64, 8, 8), torch.float32, "channels_last"),
    ((1024, 16, 32, 32), torch.float32, "contiguous"),
    ((1024, 16, 32, 32), torch.float32, "channels_last"),
    ((4096, 512), torch.float32, "contiguous"),
]


def main() -> None:
    """Measure, print the table, and write JSON if asked."""
    options = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    options.add_argument("--device", default="cpu")
    options.add_argument("--threads", type=int, default=2)
    options.add_argument("--repeats", type=int, default=31)
    options.add_argument("--processes", type=int, default=5)
    options.add_argument(
        "--no-compile", action="store_true", help="leave out what torch.compile makes"
    )
    options.add_argument("--case", type=int, help=argparse.SUPPRESS)
    options.add_argument("--json", type=Path, help="write the figures here too")
    chosen = options.parse_args()
    device = torch.device(chosen.device)
    torch.set_num_threads(chosen.threads)
    if device.type == "cuda":
        import norm_layer_gpu  # noqa: PLC0415 (beside this file)

        figures = norm_layer_gpu.report(not chosen.no_compile, norm_layer_gpu.show)
        write(chosen.json, device, figures)
        print(json.dumps({k: v for k, v in figures.items() if k != "results"}, indent=1))
        return
    if chosen.case is not None:  # a process that the loop below has started
        case = CPU_CASES[chosen.case]
        print(json.dumps(measure(case, device, chosen.repeats, not chosen.no_compile)))
        return
    results = []
    for number in range(len(CPU_CASES)):
        again = [sys.executable, __file__, *sys.argv[1:], "--case", str(number)]
        runs = [
            json.loads(subprocess.run(again, stdout=subprocess.PIPE, check=True).stdout)
            for _ in range(chosen.processes)
        ]
        results.append(combine(runs))
        print(show(results[-1]), flush=True)
    write(chosen.json, device, {"results": results})


def write(path: Path | None, device: torch.device, figures: dict[str, Any]) -> None:
    """Write the figures, and what they were measured on, where asked."""
    if path:
        versions = {"ghostbatch": __version__, "torch": torch.__version__}
        versions["python"] = platform.python_version()
        report = {"hardware": hardware(device), **versions, "ghost": GHOST, **figures}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(report, indent=1) + "\n")


def combine(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return medians over processes; ratios are taken within each process first."""
    times = [run["milliseconds"] for run in runs]
    ratios = {
        peer: {
            name: [
                round(pick(t[name] / t[peer] for t in times), 3)
                for pick in (median, min, max)  # type: ignore[operator]
            ]
            for name in times[0]
        }
        for peer in PEERS
    }
    together = {name: round(median(t[name] for t in times), 4) for name in times[0]}
    return {**runs[0], "processes": len(runs), "milliseconds": together, "ratios": ratios}


def measure(case: Case, device: torch.device, repeats: int, compiled: bool) -> dict[str, Any]:
    """Return the median milliseconds of every variant on one shape."""
    shape, dtype, layout = case
    keep_freed_memory()
    x = torch.randn(shape, device=device, dtype=dtype)
    if layout == "channels_last":
        x = x.to(memory_format=torch.channels_last)
    x.requires_grad_()
    dy = torch.randn_like(x)
    times: dict[str, list[float]] = {}
    for rivals in (eager(shape), compiled_code(shape) if compiled else ()):
        layers = {name: layer.to(device) for name, layer in rivals}
        times |= {name: [] for name in layers}
        for turn in range(repeats + 3):
            for name in random.sample(list(layers), len(layers)):
                began = time.perf_counter()
                layers[name](x).backward(dy)
                spent = time.perf_counter() - began
                x.grad = None
                layers[name].zero_grad()
                if turn >= 3:  # the first turns warm up
                    times[name].append(1e3 * spent)
    return {
        "shape": list(shape),
        "dtype": str(dtype).removeprefix("torch."),
        "layout": layout,
        "milliseconds": {name: round(median(spent), 4) for name, spent in times.items()},
    }


def eager(shape: tuple[int, ...]) -> Iterator[tuple[str, nn.Module]]:
    """Yield name and layer: ours, then every installed peer."""
    ours, plain = (
        (GhostBatchNorm1d, nn.BatchNorm1d)
        if len(shape) == 2
        else (GhostBatchNorm2d, nn.BatchNorm2d)
    )
    channels = shape[1]
    yield "ghostbatch", ours(channels, GHOST)
    yield "BatchNorm", plain(channels)
    yield "loop over chunks", Loop(plain(channels))
    if len(shape) == 2 and importlib.util.find_spec("pytorch_tabnet"):
        from pytorch_tabnet.tab_network import GBN  # noqa: PLC0415

        yield "pytorch-tabnet", GBN(channels, virtual_batch_size=GHOST)
    if importlib.util.find_spec("composer"):
        from composer.algorithms.ghost_batchnorm import ghost_batchnorm as composer  # noqa: PLC0415

        kind = composer._GhostBatchNorm1d if len(shape) == 2 else composer._GhostBatchNorm2d
        yield "composer", kind(plain(channels), GHOST)


def compiled_code(shape: tuple[int, ...]) -> Iterator[tuple[str, nn.Module]]:
    """Yield the compiled peers, timed apart: their first call after another layer is slow."""
    plain = nn.BatchNorm1d if len(shape) == 2 else nn.BatchNorm2d
    yield "BatchNorm compiled", torch.compile(plain(shape[1]))
    yield "plain code compiled", torch.compile(PlainCode(shape[1]))


class Loop(nn.Module):
    """Ghost norm as a loop over chunks."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        """Normalise chunk by chunk."""
        return torch.cat([self.norm(chunk) for chunk in x.split(GHOST)])


class PlainCode(nn.Module):
    """Ghost norm in a few lines of tensor code, for a compiler to fuse."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise over a view by ghosts."""
        ghosts = x.unflatten(0, (-1, GHOST))
        dims = [d for d in range(1, ghosts.dim()) if d != 2]
        wide = ghosts.float()
        variance, mean = torch.var_mean(wide, dims, correction=0, keepdim=True)
        shape = (1, 1, -1, *(1,) * (x.dim() - 2))
        y = (wide - mean) * torch.rsqrt(variance + 1e-5)
        return (y * self.weight.view(shape) + self.bias.view(shape)).to(x.dtype).flatten(0, 1)


def show(result: dict[str, Any]) -> str:
    """Return the lines of a table for one shape, with ratios to the two main peers."""
    times = result["milliseconds"]
    shape = ",".join(map(str, result["shape"]))
    lines = [f"({shape}) {result['dtype']} {result['layout']}"]
    for name, spent in times.items():
        ratios = [
            "{:5.2f} ({:.2f}-{:.2f}) x {}".format(*result["ratios"][peer][name], peer)
            for peer in PEERS
        ]
        lines.append(f"  {name:<20} {spent:8.3f} ms  {'  '.join(ratios)}")
    return "\n".join(lines)


def keep_freed_memory() -> None:
    """Make glibc reuse freed memory instead of returning it; do nothing on other systems."""
    with suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        mmap_threshold, trim_threshold = -3, -1
        libc.mallopt(mmap_threshold, 1 << 30)
        libc.mallopt(trim_threshold, (1 << 31) - 1)


def hardware(device: torch.device) -> str:
    """Return the name of the processor or GPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return f"{line.split(': ')[1]}, {torch.get_num_threads()} threads"
    return f"{platform.processor()}, {torch.get_num_threads()} threads"


if __name__ == "__main__":
    main()
