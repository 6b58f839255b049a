"""Variants of a small run, each into its own folder, on one rank or under torchrun.

torchrun --nproc-per-node=2 tests/support/train_variants.py OUT
"""

import sys
import warnings
from dataclasses import replace
from pathlib import Path

import torch

from ghostbatch import Recipe, Regime, train
from ghostbatch.optim import AdamW, LAMBSpec, LARSSpec
from ghostbatch.train.ranks import leave

BASE = Recipe(
    model="python:small_networks:dropping",
    data="digits",
    batch=128,
    base_batch=32,
    regime=Regime(lr=0.1, epochs=0.5, drops=((0.3, 0.01),)),
    ghost=16,
    clip=1.0,
    augment=True,
    precision="fp64",
)
SHORT = replace(BASE, regime=Regime(lr=0.1, epochs=0.25, drops=((0.15, 0.01),)))
VARIANTS = {
    "scaled rate": replace(BASE, lr_rule="sqrt"),
    "noise": replace(BASE, noise=True),
    "wrong noise": replace(BASE, label_noise=0.3, dropconnect=0.2),
    "an unused layer": replace(SHORT, model="python:small_networks:half_used"),
    "recomputed layers": replace(SHORT, model="python:small_networks:recomputed"),
    "mean": replace(BASE, running="mean"),
    "beyond": replace(
        BASE,
        regime=Regime(lr=0.1, epochs=0.5, schedule="cosine", warmup=0.1, weight_decay=0.01),
        lr_rule="sqrt",
        hold="rate",
        decay_norms=False,
        label_smoothing=0.1,
        ema=0.9,
    ),
    "plain norm": replace(BASE, ghost=None),
    "growing": replace(BASE, grow=256, label_noise=0.3, dropconnect=0.2),
    "growing with plain norm": replace(BASE, grow=256, ghost=None),
    "adamw": replace(SHORT, optimizer=AdamW(eps=1e-4), lr_rule="sqrt"),
    "lars": replace(SHORT, optimizer=LARSSpec(trust=0.1)),
    "lamb": replace(SHORT, optimizer=LAMBSpec(eps=1e-4), decay_norms=False),
}


def micros(recipe):
    """Return the micro-batches to try: none, and 64 where the norm allows it."""
    return (None, 64) if recipe.ghost and recipe.running == "sequential" else (None,)


def run_all(out, world):
    options = {"device": "cpu", "threads": 1, "evaluations": 3}
    for name, recipe in VARIANTS.items():
        measures = {"noise_scale": name == "scaled rate", "sharpness": name == "scaled rate"}
        for micro in micros(recipe):
            folder = out / name / f"{world} ranks" / f"micro {micro}"
            train(recipe, out=folder, micro=micro, **options, **measures)


if __name__ == "__main__":
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "None of the inputs have requires_grad")  # in evaluations
    torch.distributed.init_process_group("gloo")
    run_all(Path(sys.argv[1]), torch.distributed.get_world_size())
    leave()
