"""Images per second of whole updates, lever by lever, and where the time of the last one goes."""

import gc
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from engine import EAGER, VARIANTS, Data, Levers, Update
from timing import DEVICE, demand, relative_error, show, write
from torch import Tensor

CASES = "resnet44:4096,wresnet16-4:4096,vgg:4096,c1:4096,resnet44:128,c1:128"
KINDS = {  # of kernels, by a part of their name; the first that fits
    "pooling": ("max_pool",),
    "norm": ("forward_kernel", "backward_kernel", "running_kernel"),
    "flat weights": ("collect_kernel", "step_kernel", "unfold_kernel"),
    "batch and loss": ("batch_kernel", "loss_kernel", "means_kernel"),
    "copies and fills": ("copy", "fill", "Memset", "Memcpy", "nchwToNhwc", "nhwcToNchw", "cast"),
    "convolution and product": (
        *("conv", "cudnn", "xmma", "cutlass", "gemm", "nvjet", "wgrad", "dgrad", "fprop"),
        *("splitK", "reduce_kernel_split", "sm80", "sm90"),
    ),
    "residual add": ("CUDAFunctor_add",),
}


def main(cases: str = CASES, variants: str = "", path: Path | None = None) -> None:
    """Check and time every case; write and print what is known after each."""
    torch.backends.cudnn.allow_tf32 = False
    data = Data.random(50000 if DEVICE == "cuda" else 64)
    results: list[dict[str, Any]] = []
    for case in cases.split(","):
        network, _, size = case.partition(":")
        found = _measure(network, int(size), data, variants)
        results.append({"network": network, "batch": int(size)} | found)
        write(path, {"results": results})
        print(network, size, {k: round(v, 3) for k, v in results[-1]["kinds"].items()}, flush=True)
    print("milliseconds per update; images/s of the last variant")
    names = list(results[0]["milliseconds"])
    rows = [
        [r["network"], r["batch"], *(r["milliseconds"][v] for v in names), r["images/s"]]
        for r in results
    ]
    show(["network", "batch", *names, "images/s"], rows)


def _measure(network: str, batch: int, data: Data, variants: str) -> dict[str, Any]:
    """Time all variants of one network; each must begin as the eager one does."""
    started = perf_counter()
    check(network, data)
    torch.backends.cudnn.benchmark = True
    times: dict[str, float] = {}
    memory: dict[str, float] = {}
    first: dict[str, list[float]] = {}
    kinds: dict[str, float] = {}
    kernels: dict[str, list[float]] = {}
    chosen = {
        n: levers for n, levers in VARIANTS.items() if not variants or n in variants.split(",")
    }
    for name, levers in chosen.items():
        clear()
        update = Update(network, data, batch=batch, levers=levers).capture()
        draws = make_draws(update)
        update(draws[0])
        first[name] = update.sums.tolist()
        _agree(f"{network} {batch} {name}", first[name], next(iter(first.values())))
        times[name] = time_updates([update], [draws])
        if DEVICE == "cuda":
            memory[name] = torch.cuda.max_memory_allocated() / 2**30
        if name == list(chosen)[-1]:
            kinds, kernels = profile(update, draws)
        del update
    return {
        "milliseconds": times,
        "images/s": batch / times[list(chosen)[-1]] * 1e3,
        "GiB": memory,
        "first update": first,
        "kinds": kinds,
        "kernels": kernels,
        "seconds": perf_counter() - started,
    }


def check(network: str, data: Data) -> None:
    """Demand that in fp32 all levers together change the weights as eager code does.

    Folding rounds otherwise, and where rounding turns a ReLU on or off the gradient jumps; in a
    deep network these jumps add up. So the difference is compared with what the last bit of the
    weights does to eager code.
    """
    torch.backends.cudnn.benchmark = False
    batch = 256 if DEVICE == "cuda" else 4
    moved = []
    for levers, noise in ((EAGER, 0.0), (EAGER, 1e-7), (Levers(), 0.0)):
        update = Update(
            network, data, batch=batch, levers=levers, dtype=torch.float32, dropout=False
        )
        if noise:
            torch.manual_seed(3)
            for layer in update.model.modules():
                if isinstance(layer, torch.nn.Conv2d):
                    layer.weight.data.mul_(1 + noise * torch.randn_like(layer.weight))
        before = weights(update)
        update.capture()
        demand(torch.equal(weights(update), before), f"{network}: capture changed the weights")
        update(update.maker.draw(torch.Generator().manual_seed(1)))
        moved.append(weights(update) - before)
    floor, error = (relative_error(other, moved[0]) for other in moved[1:])
    print(f"{network}: fp32 update, relative change by all levers {error:.1e}, ", end="")
    print(f"by the last bit of the weights {floor:.1e}")
    demand(error < max(1e-4, 10 * floor), f"{network}: the levers change the update by {error}")


def weights(update: Update) -> Tensor:
    """Return a copy of all parameters in one row."""
    return torch.cat([p.detach().reshape(-1) for p in update.model.parameters()])


def _agree(name: str, found: list[float], right: list[float]) -> None:
    """Demand that loss and norm of a first update in bf16 are about the first variant's."""
    for what, place, tolerance in (("loss", 0, 0.03), ("norm", 2, 0.2)):
        fine = abs(found[place] - right[place]) <= tolerance * abs(right[place])
        demand(fine, f"{name}: {what} {found[place]}, eager {right[place]}")
    demand(found[4] == 0, f"{name}: the update was skipped")


def make_draws(update: Update, count: int = 8) -> list[Tensor]:
    """Draw some batches beforehand."""
    generator = torch.Generator().manual_seed(2)
    return [update.maker.draw(generator) for _ in range(count)]


def time_updates(updates: Sequence[Update], draws: Sequence[list[Tensor]]) -> float:
    """Return the median milliseconds of one update of each, started one after the other."""

    def run(rounds: int) -> float:
        start = perf_counter()
        for number in range(rounds):
            for update, batches in zip(updates, draws, strict=True):
                update(batches[number % len(batches)])
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        return 1e3 * (perf_counter() - start) / rounds

    if DEVICE == "cpu":
        return run(1)
    run(3)
    rounds = max(3, min(100, round(100 / run(2))))
    return median(run(rounds) for _ in range(7))


def profile(update: Update, draws: list[Tensor]) -> tuple[dict[str, float], dict[str, list[float]]]:
    """Return milliseconds of an update by kind of kernel, and of each kernel with its count."""
    if DEVICE == "cpu":
        return {}, {}
    runs = 3
    torch.cuda.synchronize()
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            for number in range(runs):
                update(draws[number])
            torch.cuda.synchronize()
        events = [e for e in profiler.key_averages() if e.self_device_time_total > 0]
    except Exception as error:  # the times are worth more than their breakdown
        print(f"no profile: {error!r}")
        return {}, {}
    kinds: dict[str, float] = {}
    for event in events:
        kind = next((k for k, parts in KINDS.items() if any(p in event.key for p in parts)), "rest")
        kinds[kind] = kinds.get(kind, 0.0) + event.self_device_time_total / 1e3 / runs
    kinds["kernels"] = sum(event.count for event in events) / runs
    kernels = {
        event.key[:160]: [event.self_device_time_total / 1e3 / runs, event.count / runs]
        for event in sorted(events, key=lambda e: -e.self_device_time_total)[:40]
    }
    return kinds, kernels


def clear() -> None:
    """Give memory back, so that the next variant's peak is its own."""
    gc.collect()
    if DEVICE == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
