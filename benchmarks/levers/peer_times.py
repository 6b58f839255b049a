"""What a PyTorch user would write: plain batch norm, torch.compile, and one CUDA graph."""

from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from engine import EAGER, Data, Update
from engine_times import CASES, clear, make_draws, time_updates
from timing import DEVICE, show, write

PEER = replace(EAGER, graph=True, compiled=True)


def main(cases: str = CASES, path: Path | None = None) -> None:
    """Time every case."""
    torch.backends.cudnn.benchmark = True
    data = Data.random(50000 if DEVICE == "cuda" else 64)
    results: list[dict[str, Any]] = []
    for case in cases.split(","):
        network, _, size = case.partition(":")
        clear()
        torch._dynamo.reset()
        started = perf_counter()
        update = Update(network, data, batch=int(size), levers=PEER, ghost=None).capture()
        ready = perf_counter() - started
        spent = time_updates([update], [make_draws(update)])
        results.append(
            {"network": network, "batch": int(size), "milliseconds": spent}
            | {"images/s": int(size) / spent * 1e3, "seconds to compile": ready}
        )
        del update
        write(path, {"results": results})
        print(results[-1], flush=True)
    columns = ["network", "batch", "milliseconds", "images/s", "seconds to compile"]
    show(columns, [[r[c] for c in columns] for r in results])
