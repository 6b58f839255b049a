"""Images per second of whole updates, against ``torch.compile`` with a CUDA graph.

    python benchmarks/train_step.py
    python benchmarks/train_step.py --cases resnet44:4096,resnet44:128 --json FILE

Ours are the updates of `ghostbatch.train`: gather, crop and flip the batch, forward, backward,
clip, step, metrics. Batches of 4096 have ghosts of 128, batches of 128 plain batch norm. The peer
is what a PyTorch user would write: plain batch norm, bf16 autocast, channels_last, fused SGD,
clipping, torch.compile, one CUDA graph; its batch lies ready on the GPU. The last column is ours
over the peer's, of the same run.
"""

import argparse
import gc
import json
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.nn.functional as F

from ghostbatch import Recipe, Regime
from ghostbatch.data import load, open_feed
from ghostbatch.nn import MODELS
from ghostbatch.train.capture import choose_update
from ghostbatch.train.ranks import Ranks
from ghostbatch.train.split import split_batch
from ghostbatch.train.state import State, image_format, use_gpu_layers
from ghostbatch.train.update import Update

CASES = (
    "resnet44:4096,wresnet16-4:4096,vgg:4096,c1:4096,resnet44:128,wresnet16-4:128,vgg:128,c1:128"
)
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SAMPLES = 50_000 if DEVICE.type == "cuda" else 256


def our_update(network: str, batch: int) -> Update:
    """Return an update as `ghostbatch.train` makes it."""
    recipe = Recipe(
        model=network,
        data=f"synthetic:3x32x32:{SAMPLES}",
        batch=batch,
        base_batch=128,
        regime=Regime(lr=0.1, epochs=1000),
        ghost=128 if batch > 128 else None,
        augment=True,
        precision="bf16",
    )
    data = load(recipe.data)
    state = State(recipe.plan(data.info.samples), data.info, DEVICE)
    split = split_batch(recipe, state.model, None, world=1)
    if DEVICE.type == "cuda":
        use_gpu_layers(state.model, recipe, one_rank=True)
    how = image_format(state.model, recipe, DEVICE)
    feed = open_feed(data, batch=batch, seed=0, augment=True, device=DEVICE, **how)
    return choose_update(state, feed, Ranks())(state, feed, split, Ranks())


def peer_update(network: str, batch: int) -> Callable[[], Any]:
    """Return an update of plain PyTorch: compiled and captured in a CUDA graph."""
    torch.manual_seed(0)
    model = MODELS[network](10).to(DEVICE, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4, fused=True
    )
    images = torch.randn(batch, 3, 32, 32, device=DEVICE).to(memory_format=torch.channels_last)
    labels = torch.randint(10, (batch,), device=DEVICE)
    compiled = torch.compile(model, dynamic=False)

    def update() -> None:
        optimizer.zero_grad()
        with torch.autocast(DEVICE.type, torch.bfloat16):
            loss = F.cross_entropy(compiled(images), labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()

    if DEVICE.type == "cpu":
        return update
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            update()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        update()
    kept = (model, optimizer, images, labels)  # as long as the graph
    return lambda: (graph.replay(), kept)


def milliseconds(update: Callable[[], Any]) -> float:
    """Return the median time of an update, over seven stretches of about 0.2 s."""

    def run(count: int) -> float:
        start = perf_counter()
        for _ in range(count):
            update()
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
        return 1e3 * (perf_counter() - start) / count

    if DEVICE.type == "cpu":
        return run(1)
    run(6)  # compiles, captures
    count = max(3, round(200 / run(3)))
    return median(run(count) for _ in range(7))


def profile(update: Callable[[], Any]) -> dict[str, list[float]]:
    """Return milliseconds per update and launches of the kernels that take most of the time."""
    if DEVICE.type == "cpu":
        return {}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(3):
            update()
        torch.cuda.synchronize()
    events = sorted(profiler.key_averages(), key=lambda e: -e.self_device_time_total)
    return {e.key[:120]: [e.self_device_time_total / 3e3, e.count / 3] for e in events[:40]}


def measure(network: str, batch: int, with_peer: bool) -> dict[str, Any]:
    """Time our update and the peer's."""
    found: dict[str, Any] = {"network": network, "batch": batch}
    began = perf_counter()
    update = our_update(network, batch)
    update()
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    found["seconds to the first update"] = perf_counter() - began
    found["ms"] = milliseconds(update)
    found["images/s"] = 1e3 * batch / found["ms"]
    found["kernels"] = profile(update)
    found["problem"] = update.state.monitor.read().problem
    update.close()
    del update
    _clear()
    if with_peer:
        began = perf_counter()
        peer = peer_update(network, batch)
        found["seconds to compile the peer"] = perf_counter() - began
        found["peer ms"] = milliseconds(peer)
        found["x peer"] = found["peer ms"] / found["ms"]
        del peer
        _clear()
    return found


def _clear() -> None:
    gc.collect()
    torch._dynamo.reset()
    if DEVICE.type == "cuda":
        torch.cuda.empty_cache()


def main() -> None:
    """Measure every case; print a table last."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cases", default=CASES, help="NETWORK:BATCH,...")
    parser.add_argument("--no-peer", action="store_true", help="leave torch.compile out")
    parser.add_argument("--json", type=Path, help="write all figures here")
    options = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    results = []
    for case in options.cases.split(","):
        network, _, batch = case.partition(":")
        results.append(measure(network, int(batch), not options.no_peer))
        if options.json:
            gpu = torch.cuda.get_device_name() if DEVICE.type == "cuda" else None
            report = {"gpu": gpu, "torch": torch.__version__, "results": results}
            options.json.write_text(json.dumps(report, indent=1) + "\n")
    print(f"{'network':<12} {'batch':>6} {'ms':>8} {'images/s':>10} {'peer ms':>8} {'x peer':>7}")
    for r in results:
        peer = f"{r['peer ms']:8.3f} {r['x peer']:7.2f}" if "x peer" in r else ""
        print(f"{r['network']:<12} {r['batch']:>6} {r['ms']:8.3f} {r['images/s']:>10,.0f} {peer}")


if __name__ == "__main__":
    main()
