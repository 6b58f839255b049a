"""Uses the library where fcntl and os.register_at_fork do not exist, as on Windows.

Usage: python tests/without_posix.py FOLDER
"""

import os
import sys
from pathlib import Path

import torch  # before the blocking, because its build is that of this system
from torch import nn

sys.modules["fcntl"] = None  # makes its import fail
for name in ("fork", "register_at_fork", "sched_getaffinity"):
    delattr(os, name)

import ghostbatch as gb  # noqa: E402 (after the blocking)


def main(folder: Path) -> None:
    """Use layers, conversion, schedules and diagnostics, then train."""
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    gb.to_ghost(model, ghost=8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    regime = gb.Regime(lr=0.1, epochs=2, drops=((1, 0.01),))
    scheduler = gb.RegimeScheduler(optimizer, regime, samples_per_epoch=32, batch=32)
    distance = gb.WeightDistance(model)
    for _ in range(2):
        model(torch.randn(32, 4)).square().mean().backward()
        optimizer.step()
        scheduler.step()
    assert distance.distance().total > 0
    gb.to_plain(model)
    gb.random_potential(model, lambda m: m[0].weight.square().sum(), radius=1, samples=10)
    recipe = gb.Recipe(
        model="f1",
        data="digits",
        batch=64,
        base_batch=64,
        regime=gb.Regime(lr=0.05, epochs=0.064),
        ghost=16,
    )
    print(gb.train(recipe, out=folder, device="cpu", threads=1).status)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
