"""Runs under torchrun: every variant of a small run, each into a folder of its own.

    torchrun --nproc-per-node=2 tests/train/ranks.py OUT

On one rank the same variants are what the others are compared with.
"""

import sys
import warnings
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from ghostbatch import Recipe, Regime, train
from ghostbatch.nn import MODELS
from ghostbatch.train.ranks import leave


def dropping(num_classes=10, *, in_channels=1, image_size=28):
    """Convolution, two norms and both kinds of dropout."""
    return nn.Sequential(
        *(nn.Conv2d(in_channels, 4, 5, stride=3, bias=False), nn.BatchNorm2d(4), nn.ReLU()),
        *(nn.Dropout2d(0.2), nn.Flatten(), nn.Linear(4 * (image_size // 3 - 1) ** 2, 32)),
        *(nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, num_classes)),
    )


MODELS["dropping"] = dropping

BASE = Recipe(
    model="dropping",
    data="digits",
    batch=128,
    base_batch=32,
    regime=Regime(lr=0.1, epochs=0.5, drops=((0.3, 0.01),)),
    ghost=16,
    clip=1.0,
    augment=True,
    precision="fp64",
)
VARIANTS = {
    "scaled rate": replace(BASE, lr_rule="sqrt"),
    "noise": replace(BASE, noise=True),
    "mean": replace(BASE, running="mean"),
    "plain norm": replace(BASE, ghost=None),
}


def micros(recipe):
    """All at once, and in pieces where the norm allows it."""
    return (None, 64) if recipe.ghost and recipe.running == "sequential" else (None,)


def main(out, world):
    for name, recipe in VARIANTS.items():
        for micro in micros(recipe):
            folder = out / name / f"{world} ranks" / f"micro {micro}"
            train(recipe, out=folder, device="cpu", micro=micro, threads=1, evaluations=3)


if __name__ == "__main__":
    warnings.simplefilter("error")
    torch.distributed.init_process_group("gloo")
    main(Path(sys.argv[1]), torch.distributed.get_world_size())
    leave()
