"""The length of the mean step over the deviation of one step, for F1 on the embedded digits.

    python benchmarks/mean_step.py    # a minute on one core

The paper says that the mean step is smaller than its deviation by orders of magnitude. A step is
here the gradient of a batch drawn at random, over all parameters, in training mode, so that norm
layers use batch statistics. With K batches |mean|^2 is estimated without bias from the products of
different batches, (|sum g|^2 - sum |g|^2) / (K (K - 1)). Errors are standard errors over REPEATS.
"""

from dataclasses import replace
from math import sqrt
from statistics import mean, stdev
from tempfile import TemporaryDirectory

import torch
import torch.nn.functional as F
from torch import nn

import ghostbatch as gb
from ghostbatch.data import load
from ghostbatch.data.datasets import ImageData
from ghostbatch.optim import Regime
from ghostbatch.recipes import find_recipe
from ghostbatch.train.state import initial_model

REGIME = Regime(lr=0.05, epochs=4, drops=((2, 0.005), (3, 0.0005)))
"""That of the study `diffusion`, in which SB has 500 updates."""

REPEATS = 4
BATCHES = {32: 64, 1024: 12}
"""Batches drawn in each repeat, by batch size."""


def main() -> None:
    """Measure and print the ratio before and after training, at the small and a large batch."""
    recipe, data = replace(find_recipe("f1-digits"), regime=REGIME), load("digits")
    with TemporaryDirectory() as folder:
        gb.train(recipe, out=folder)
        models = {"before": initial_model(recipe, data.info), "after": gb.load_run(folder)}
    draw = torch.Generator().manual_seed(0)
    for when, model in models.items():
        for batch in BATCHES:
            ratios = [mean_over_deviation(model.train(), data, batch, draw) for _ in range(REPEATS)]
            error = stdev(ratios) / sqrt(REPEATS)
            print(f"{when} training, batch {batch}: {mean(ratios):.3f} ± {error:.3f}")


def mean_over_deviation(
    model: nn.Module, data: ImageData, batch: int, draw: torch.Generator
) -> float:
    """Return the length of the mean gradient over the root-mean-square of its deviation."""
    parameters, count = list(model.parameters()), BATCHES[batch]
    total = torch.zeros(sum(p.numel() for p in parameters))
    squares = 0.0
    for _ in range(count):
        chosen = torch.randperm(len(data.train), generator=draw)[:batch]
        images = (data.train.images[chosen] - data.mean) / data.deviation
        loss = F.cross_entropy(model(images.float()), data.train.labels[chosen])
        flat = torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)])
        total += flat
        squares += float(flat @ flat)
    mean_square = (float(total @ total) - squares) / (count * (count - 1))
    return sqrt(max(mean_square, 0.0) / (squares / count - mean_square))


if __name__ == "__main__":
    main()
