"""Small-batch regimes for the networks of table 1 whose regime the paper does not give."""

from dataclasses import replace

from ghostbatch.optim import Regime
from ghostbatch.recipes import falling, find_recipe
from ghostbatch.study.declare import Row, Study
from ghostbatch.study.select import held_out

HELD_OUT = 5000
"""Training images that are kept aside; no run sees the test set."""


def calibration() -> Study:
    """Regimes for the small batch of C1, C3 and VGG, compared on held-out training images.

    Command: ``ghostbatch study calibration``.
    Rule, fixed before the runs: take the regime whose accuracy is nearest to the paper's for the
    small batch. Large batches are not looked at. Reports show the paper's accuracies, which are on
    the test set, beside the cells.
    Expected: docs/results.md, run with ``--precision bf16 --seeds 0``.
    Cost: 135 million images per seed.
    """
    accuracies = {"c1-cifar10": 87.80, "c3-cifar100": 61.25, "vgg-cifar10": 92.30}
    rows = {}
    for name, accuracy in accuracies.items():
        recipe = find_recipe(name)
        columns = {each: replace(recipe, regime=regime) for each, regime in _regimes().items()}
        rows[name] = Row(columns, paper=dict.fromkeys(columns, accuracy))
    return held_out(Study("calibration", rows), HELD_OUT)


def _regimes() -> dict[str, Regime]:
    """Return the candidates: rates that fall to a fifth three times, and those of two sources."""
    regimes = {f"from {lr:g}": falling(lr) for lr in (0.05, 0.02, 0.01)}
    # The regime of the paper's ResNet44, and the authors' code for C1 and VGG with momentum 0.9.
    drops = ((81, 0.01), (122, 1e-3), (164, 1e-4))
    regimes["as ResNet44"] = Regime(lr=0.1, epochs=200, drops=drops, weight_decay=5e-4)
    drops = ((60, 0.01), (120, 1e-3), (180, 1e-4))
    regimes["authors"] = Regime(lr=1e-3, epochs=200, drops=drops, weight_decay=5e-4)
    return regimes
