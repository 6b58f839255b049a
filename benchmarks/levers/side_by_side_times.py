"""Eight runs of batch 128 on one GPU: branches of one graph, and graphs on streams."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from engine import Data, Levers, Update
from engine_times import clear, make_draws, time_updates, weights
from timing import DEVICE, show, write
from torch import Tensor

BATCH = 128 if DEVICE == "cuda" else 4
RUNS = 8 if DEVICE == "cuda" else 2
UPDATES = 5
CASES = "resnet44,c1"


class Branches:
    """Several updates captured as branches of one graph, each on a stream of its own."""

    def __init__(self, updates: Sequence[Update]) -> None:
        self.updates = updates
        self.graph: torch.cuda.CUDAGraph | None = None
        if DEVICE == "cpu":
            return
        for update in updates:
            update.warm_up()
        self.graph, main = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.graph(self.graph, stream=main):
            for update in updates:
                update.stream.wait_stream(main)
                with torch.cuda.stream(update.stream):
                    update.compute()
            for update in updates:
                main.wait_stream(update.stream)

    def __call__(self, draws: Sequence[Tensor]) -> None:
        """Do one update of every run."""
        for update, batch in zip(self.updates, draws, strict=True):
            update.maker.draws.copy_(batch, non_blocking=True)
        if self.graph is not None:
            self.graph.replay()
        else:
            for update in self.updates:
                update.compute()


class OnStream:
    """An update whose graph is replayed on a stream of its own."""

    def __init__(self, update: Update) -> None:
        self.update = update.capture()

    def __call__(self, draws: Tensor) -> None:
        """Do one update; nothing waits for it."""
        with torch.cuda.stream(self.update.stream):
            self.update(draws)


def main(cases: str = CASES, path: Path | None = None) -> None:
    """Time one run alone, then eight both ways; compare the weights with those of runs alone."""
    torch.backends.cudnn.benchmark = True
    data = Data.random(50000 if DEVICE == "cuda" else 64)
    results: list[dict[str, Any]] = []
    for network in cases.split(","):
        alone = [_alone(network, data, seed) for seed in (0, 0, RUNS - 1)]
        result: dict[str, Any] = {
            "network": network,
            "one run, ms": alone[0][0],
            "a run repeats its bits": torch.equal(alone[0][1], alone[1][1]),
        }
        result |= _branches(network, data, alone[-1][1])
        result |= _streams(network, data, alone[-1][1])
        for way in ("one run", "branches", "streams"):
            runs = 1 if way == "one run" else RUNS
            result[f"{way}, images/s"] = runs * BATCH / result[f"{way}, ms"] * 1e3
        results.append(result)
        write(path, {"results": results})
    print(f"{RUNS} runs of batch {BATCH}; ms for one update of all")
    columns = [c for c in results[0] if c != "network"]
    show(["", *(r["network"] for r in results)], [[c, *(r[c] for r in results)] for c in columns])


def _update(network: str, data: Data, seed: int) -> Update:
    return Update(network, data, batch=BATCH, levers=Levers(), seed=seed, dropout=False)


def _alone(network: str, data: Data, seed: int) -> tuple[float, Tensor]:
    """Return the time of one run by itself, and its weights after some updates."""
    clear()
    update = _update(network, data, seed).capture()
    draws = make_draws(update)
    for number in range(UPDATES):
        update(draws[number])
    return_weights = weights(update)
    return time_updates([update], [draws]), return_weights


def _branches(network: str, data: Data, right: Tensor) -> dict[str, Any]:
    clear()
    updates = [_update(network, data, seed) for seed in range(RUNS)]
    together = Branches(updates)
    draws = make_draws(updates[0])
    for number in range(UPDATES):
        together([draws[number]] * RUNS)
    same = torch.equal(weights(updates[-1]), right)
    several = [[batch] * RUNS for batch in draws]
    spent = time_updates([together], [several])  # type: ignore[list-item, arg-type]
    return {"branches, ms": spent, "branches have the bits of a run alone": same}


def _streams(network: str, data: Data, right: Tensor) -> dict[str, Any]:
    clear()
    updates = [_update(network, data, seed) for seed in range(RUNS)]
    if DEVICE == "cpu":
        return {"streams, ms": 1.0, "streams have the bits of a run alone": None}
    runs = [OnStream(update) for update in updates]
    draws = make_draws(updates[0])
    for number in range(UPDATES):
        for run in runs:
            run(draws[number])
    torch.cuda.synchronize()
    same = torch.equal(weights(updates[-1]), right)
    spent = time_updates(runs, [draws] * RUNS)  # type: ignore[arg-type]
    return {"streams, ms": spent, "streams have the bits of a run alone": same}
