"""Images per second of whole updates, against what a PyTorch user would write.

    python benchmarks/train_step.py
    python benchmarks/train_step.py --cases resnet44:4096,resnet44:128,resnet44:128x8 --json FILE

Ours are the updates of `ghostbatch.train`: gather the batch, forward, backward, clip, step,
metrics; on a GPU also crop and flip. Batches above 128 have ghosts of 128, others plain batch norm.
The peer has plain batch norm, the same network, clipping and SGD. On a GPU it has bf16 autocast,
channels_last, fused SGD, torch.compile and one CUDA graph, and its batch lies ready; on a CPU it is
an eager loop in fp32 that gathers each batch from normalised images. The last column is the peer's
time over ours, of the same run. "128x8" are eight runs side by side, in threads that take turns as
in `ghostbatch.train`, against one peer; their time is that of an update of each. ``--turns`` and
``--ahead`` compare other turns with those of `ghostbatch.train`, which are 20 and 0.
"""

import argparse
import gc
import json
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
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
from ghostbatch.train.device import LAUNCHES, READ_EVERY
from ghostbatch.train.ranks import Ranks
from ghostbatch.train.split import split_batch
from ghostbatch.train.state import State, image_format, use_gpu_layers
from ghostbatch.train.update import Update

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ON_GPU = DEVICE.type == "cuda"
SAMPLES = 50_000 if ON_GPU else 4096
LARGE = "resnet44:4096,wresnet16-4:4096,vgg:4096,c1:4096,c3:4096"
SMALL = "f1:128,resnet44:128,resnet44:128x8,wresnet16-4:128,vgg:128,c1:128,c1:128x8"
CASES = f"{LARGE},{SMALL}" if ON_GPU else "f1:128,f1:1024,c1:128,c1:512,resnet44:128,resnet44:512"


def our_update(network: str, batch: int) -> Update:
    """Return an update as `ghostbatch.train` makes it."""
    recipe = Recipe(
        model=network,
        data=f"synthetic:3x32x32:{SAMPLES}",
        batch=batch,
        base_batch=128,
        regime=Regime(lr=0.1, epochs=1000),
        ghost=128 if batch > 128 else None,
        augment=ON_GPU,
        precision="bf16" if ON_GPU else "fp32",
    )
    data = load(recipe.data)
    state = State(recipe.plan(data.info.samples), data.info, DEVICE)
    split = split_batch(recipe, state.model, None, world=1)
    if ON_GPU:
        use_gpu_layers(state.model, recipe, one_rank=True)
    how = image_format(state.model, recipe, DEVICE)
    feed = open_feed(data, batch=batch, seed=0, augment=ON_GPU, device=DEVICE, **how)
    return choose_update(state, feed, Ranks())(state, feed, split, Ranks())


def peer_update(network: str, batch: int) -> Callable[[], Any]:
    """Return an update of plain PyTorch: compiled and captured in a CUDA graph."""
    torch.manual_seed(0)
    layout = torch.channels_last if ON_GPU else torch.contiguous_format
    model = MODELS[network](10, in_channels=3, image_size=32).to(DEVICE, memory_format=layout)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4, fused=ON_GPU or None
    )
    samples = batch if ON_GPU else SAMPLES
    images = torch.randn(samples, 3, 32, 32, device=DEVICE).to(memory_format=layout)
    labels = torch.randint(10, (samples,), device=DEVICE)
    called = torch.compile(model, dynamic=False) if ON_GPU else model

    def update() -> None:
        optimizer.zero_grad()
        x, target = images, labels
        if not ON_GPU:
            chosen = torch.randint(samples, (batch,))
            x, target = images[chosen], labels[chosen]
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=ON_GPU):
            loss = F.cross_entropy(called(x), target)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()

    if not ON_GPU:
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


class SideBySide:
    """Updates of several runs, each in a thread with a CUDA stream of its own.

    A run launches ``turn`` updates while the others launch none. Then it waits until it is at most
    ``ahead`` turns ahead of the GPU.
    """

    turn = READ_EVERY["cuda"]
    ahead = 0

    def __init__(self, network: str, batch: int, runs: int) -> None:
        self._pool = ThreadPoolExecutor(runs)
        self._streams = [torch.cuda.Stream() for _ in range(runs)]
        self.updates = [self._on_stream(k, network, batch) for k in range(runs)]
        self.state = self.updates[0].state

    def _on_stream(self, number: int, network: str, batch: int) -> Update:
        with torch.cuda.stream(self._streams[number]):
            return our_update(network, batch)

    def run(self, count: int) -> None:
        """Run so many updates of each."""
        list(self._pool.map(lambda number: self._run(number, count), range(len(self.updates))))

    def _run(self, number: int, count: int) -> None:
        launched: deque[Any] = deque()  # the ends of turns
        with torch.cuda.stream(self._streams[number]):
            for first in range(0, count, self.turn):
                with LAUNCHES:
                    for _ in range(min(self.turn, count - first)):
                        self.updates[number]()
                launched.append(self._streams[number].record_event())
                if len(launched) > self.ahead:
                    launched.popleft().synchronize()
        self._streams[number].synchronize()

    def __call__(self) -> None:
        """Run one update of each."""
        self.run(1)

    def close(self) -> None:
        """Free the graphs, and end the threads."""
        for update in self.updates:
            update.close()
        self._pool.shutdown()


def milliseconds(*updates: Callable[[], Any]) -> list[float]:
    """Return the median time of each update, over seven rounds of stretches of about 0.2 s.

    Several runs have stretches of about 2 s, of many turns each: at the start of a stretch one run
    after the other begins, and until then the GPU is not full.
    """

    def run(update: Callable[[], Any], count: int) -> float:
        start = perf_counter()
        if isinstance(update, SideBySide):
            update.run(count)
        else:
            for _ in range(count):
                update()
        if ON_GPU:
            torch.cuda.synchronize()
        return 1e3 * (perf_counter() - start) / count

    counts = []
    for update in updates:
        run(update, 6 if ON_GPU else 2)  # compiles, captures
        stretch = 2000 if isinstance(update, SideBySide) else 200
        counts.append(max(2, round(stretch / run(update, 2))))
    rounds = [[run(*each) for each in zip(updates, counts, strict=True)] for _ in range(7)]
    return [median(times) for times in zip(*rounds, strict=True)]


def compare_turns(
    update: SideBySide, turns: Sequence[int], ahead: Sequence[int]
) -> list[dict[str, float]]:
    """Time an update of each run with other turns."""
    found = []
    for update.turn, update.ahead in product(turns, ahead):
        (ms,) = milliseconds(update)
        found.append({"turn": update.turn, "ahead": update.ahead, "ms": ms})
        print(f"  turns of {update.turn}, {update.ahead} ahead: {ms:.3f} ms")
    return found


def host_milliseconds(update: Update) -> float:
    """Return the time that the host takes to launch an update while the GPU has room for more."""
    count = 10
    torch.cuda.synchronize()
    began = perf_counter()
    for _ in range(count):
        update()
    spent = perf_counter() - began
    torch.cuda.synchronize()
    return 1e3 * spent / count


def profile(update: Callable[[], Any]) -> dict[str, list[float]]:
    """Return milliseconds per update and launches of the kernels that take most of the time."""
    if not ON_GPU:
        return {}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(3):
            update()
        torch.cuda.synchronize()
    found: dict[str, list[float]] = {}
    for event in sorted(profiler.key_averages(), key=lambda e: -e.self_device_time_total):
        times = found.setdefault(event.key[:60], [0.0, 0.0])  # long names differ in their ends
        times[0] += event.self_device_time_total / 3e3
        times[1] += event.count / 3
    return found


def measure(network: str, batch: int, runs: int, options: argparse.Namespace) -> dict[str, Any]:
    """Time our update, or one of each of several runs, and the peer's."""
    found: dict[str, Any] = {"network": network, "batch": batch, "runs": runs}
    began = perf_counter()
    alone = runs == 1
    update = our_update(network, batch) if alone else SideBySide(network, batch, runs)
    update()
    if ON_GPU:
        torch.cuda.synchronize()
    found["seconds to the first update"] = perf_counter() - began
    if not options.no_peer:
        began = perf_counter()
        peer = peer_update(network, batch)
        found["seconds to compile the peer"] = perf_counter() - began
        found["ms"], found["peer ms"] = milliseconds(update, peer)
        found["x peer"] = runs * found["peer ms"] / found["ms"]
        del peer
    else:
        (found["ms"],) = milliseconds(update)
    found["images/s"] = 1e3 * batch * runs / found["ms"]
    if isinstance(update, SideBySide) and options.turns:
        found["other turns"] = compare_turns(update, options.turns, options.ahead)
    if ON_GPU and isinstance(update, Update):
        found["host ms"] = host_milliseconds(update)
    found["kernels"] = profile(update) if alone else {}
    found["problem"] = update.state.monitor.read().problem
    update.close()
    del update
    _clear()
    return found


def _clear() -> None:
    gc.collect()
    torch._dynamo.reset()
    if ON_GPU:
        torch.cuda.empty_cache()


def main() -> None:
    """Measure every case; print a table last."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cases", default=CASES, help="NETWORK:BATCH or NETWORK:BATCHxRUNS, ...")
    parser.add_argument("--no-peer", action="store_true", help="leave torch.compile out")
    whole = {"type": int, "nargs": "*"}
    parser.add_argument("--turns", **whole, default=(), help="updates of a turn, to compare")
    parser.add_argument("--ahead", **whole, default=(0,), help="turns that a run may be ahead")
    parser.add_argument("--json", type=Path, help="write all figures here")
    options = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    results = []
    for case in options.cases.split(","):
        network, _, sizes = case.partition(":")
        batch, _, runs = sizes.partition("x")
        results.append(measure(network, int(batch), int(runs or 1), options))
        if options.json:
            gpu = torch.cuda.get_device_name() if ON_GPU else None
            report = {"gpu": gpu, "torch": torch.__version__, "results": results}
            options.json.write_text(json.dumps(report, indent=1) + "\n")
    print("network       batch runs       ms   images/s  peer ms  x peer")
    for r in results:
        peer = f"{r['peer ms']:8.3f} {r['x peer']:7.2f}" if "x peer" in r else ""
        ours = f"{r['runs']:>4} {r['ms']:8.3f} {r['images/s']:>10,.0f}"
        print(f"{r['network']:<12} {r['batch']:>6} {ours} {peer}")


if __name__ == "__main__":
    main()
