"""The paper's tables and figures, declared.

Tables have a batch of 4096 and ghosts of 128 unless they say otherwise; figures are of ResNet44 on
CIFAR-10. The cost is that of one seed.
"""

from dataclasses import replace
from fractions import Fraction

from ghostbatch.recipe import Recipe
from ghostbatch.recipes import find_recipe
from ghostbatch.study.declare import Row, Study
from ghostbatch.study.instruments import Instrument
from ghostbatch.study.rows import (
    by_size,
    longer_first_phase,
    paper_row,
    rate_or_noise,
    without_weight_decay,
)

LARGE, GHOST = 4096, 128
FIGURE_NETWORK = "resnet44-cifar10"
FIGURE_SIZES = (64, 128, 256, 512, 1024, 2048)
FIGURE_LARGE = 2048
FACTORS = (Fraction(1, 4), Fraction(1, 2), 1, 2, 4)
"""Lengths of the first phase in `longer`."""


def table1() -> Study:
    """Validation accuracy of six networks in the paper's five columns, at batch 4096.

    Command: ``ghostbatch study table1``.
    The paper: +RA is at least as good as SB in five rows of six; ResNet44 has SB 92.83, LB 86.10,
    +LR 89.30, +GBN 90.50, +RA 93.07 %. Reports show its figures beside every cell.
    Expected: what docs/results.md lists, of the cells that were run, in bf16.
    Cost: 1,748 million images per seed, of which +RA takes 1,536 million.
    """
    accuracies = {  # SB, LB, +LR, +GBN, +RA
        "f1-mnist": (98.27, 97.05, 97.55, 97.60, 98.53),
        "c1-cifar10": (87.80, 83.95, 86.15, 86.4, 88.20),
        "resnet44-cifar10": (92.83, 86.10, 89.30, 90.50, 93.07),
        "vgg-cifar10": (92.30, 84.1, 88.6, 91.50, 93.03),
        "c3-cifar100": (61.25, 51.50, 57.38, 57.5, 63.20),
        "wresnet16-4-cifar100": (73.70, 68.15, 69.05, 71.20, 73.57),
    }
    rows = {name: paper_row(find_recipe(name), LARGE, GHOST, p) for name, p in accuracies.items()}
    return Study("table1", rows)


def table2() -> Study:
    """AlexNet on ImageNet in the paper's five columns, at batch 4096 and 8192.

    Command: ``ghostbatch study table2``.
    The paper: SB 57.10 %; LB 41.23 and +LR 53.25 %, which the authors could fit at 2048 only; +GBN
    54.92 at 4096 and 53.93 at 8192; +RA 59.5 % at both. Here LB and +LR run at 2048 as theirs, and
    also at 4096 and 8192.
    Expected: not run yet.
    Cost: 4,151 million images per seed, of which +RA takes 3,690 million. Both rows run SB and the
    columns at 2048.
    """
    recipe = find_recipe("alexnet-imagenet")
    as_theirs = {"SB": 57.10, "LB 2048": 41.23, "+LR 2048": 53.25}
    rows = {
        "LB 4096": _alexnet_row(recipe, 4096, {**as_theirs, "+GBN": 54.92, "+RA": 59.5}),
        "LB 8192": _alexnet_row(recipe, 8192, {**as_theirs, "+GBN": 53.93, "+RA": 59.5}),
    }
    return Study("table2", rows)


def _alexnet_row(recipe: Recipe, large: int, paper: dict[str, float]) -> Row:
    """Return the five columns at a batch, and after SB the authors' LB and +LR at 2048."""
    row, theirs = (paper_row(recipe, size, GHOST) for size in (large, 2048))
    small, *others = row.columns.items()
    at_2048 = [(f"{column} 2048", theirs.columns[column]) for column in ("LB", "+LR")]
    return replace(row, columns=dict([small, *at_2048, *others]), paper=paper)


def figure1() -> Study:
    """Training and validation error by epoch for batch sizes from 64 to 2048.

    Command: ``ghostbatch study figure1``.
    The paper: with the number of epochs fixed, validation error grows with the batch.
    Expected: not run yet.
    Cost: 60 million images per seed.
    """
    row = by_size(find_recipe(FIGURE_NETWORK), FIGURE_SIZES, ("error-by-epoch", "error-by-update"))
    return Study("figure1", {FIGURE_NETWORK: row})


def figure2() -> Study:
    """How far the weights walk from their initial values, by batch size.

    Command: ``ghostbatch study figure2``.
    The paper: distance grows as log t in the first phase. (a) before: the slope depends on the
    batch; (b) after +LR and +GBN: the slopes agree better. The row without weight decay is our
    control, since weight decay moves the weights by itself.
    Expected: not run yet; docs/diffusion.md has the same in small.
    Cost: 180 million images per seed.
    """
    recipe = find_recipe(FIGURE_NETWORK)
    variants = {
        "before": recipe,
        "after": replace(recipe, lr_rule="sqrt", ghost=GHOST),
        "no weight decay": without_weight_decay(recipe),
    }
    figures = ("distance", "error-by-epoch")
    rows = {name: by_size(each, FIGURE_SIZES, figures) for name, each in variants.items()}
    return Study("figure2", rows)


def figure3() -> Study:
    """Validation error of adapted large-batch runs, full and zoomed.

    Command: ``ghostbatch study figure3``.
    The paper: with +LR, +GBN and +RA, large batches reach the validation error of the small one.
    The batch sizes here are those of figure 1 above the small batch.
    Expected: not run yet.
    Cost: 310 million images per seed.
    """
    recipe = find_recipe(FIGURE_NETWORK)
    large = [size for size in FIGURE_SIZES if size > recipe.batch]
    columns = {"SB": recipe}
    columns |= {f"adapted {size}": recipe.large(size, ghost=GHOST) for size in large}
    row = Row(columns, ("error-by-update", "error-by-epoch", "error-zoomed"))
    return Study("figure3", {FIGURE_NETWORK: row})


def figure_b() -> Study:
    """The loss around the initial weights, at a thousand random places.

    Command: ``ghostbatch study figure-b``.
    The paper: the deviation of the loss grows linearly with the distance, so alpha = 2, up to a
    distance of about 10; the weights are initialised as Glorot and Bengio do. Here the places reach
    as far as the weights of one run do. Any smooth loss with a gradient has alpha = 2 near the
    origin, so look at several radii, and at alpha with the mean trend removed.
    Expected: not run yet.
    Cost: 10 million images for the run, and 1 million forward for the thousand places.
    """
    recipe = replace(find_recipe(FIGURE_NETWORK), init="glorot")
    rows = {FIGURE_NETWORK: Row({"SB": recipe}, ("distance",))}
    return Study("figure-b", rows, seeds=(0,), instruments=(Instrument("potential", recipe),))


def figure_c1() -> Study:
    """Batch 2048, adapted by +LR, +GBN and +RA, against unadapted.

    Command: ``ghostbatch study figure-c1``.
    The paper: adapting the regime closes the gap to the small batch, which is a column here, too.
    Expected: not run yet.
    Cost: 180 million images per seed.
    """
    recipe = find_recipe(FIGURE_NETWORK)
    columns = {
        "SB": recipe,
        "unadapted": replace(recipe, batch=FIGURE_LARGE),
        "adapted": recipe.large(FIGURE_LARGE, ghost=GHOST),
    }
    row = Row(columns, ("error-by-update", "error-by-epoch", "error-zoomed"))
    return Study("figure-c1", {FIGURE_NETWORK: row})


def figure_c2() -> Study:
    """A scaled learning rate against multiplicative noise, at batch 2048.

    Command: ``ghostbatch study figure-c2``.
    The paper: both reach about the same error. The columns LB and SB of the same updates are our
    controls: noise imitates the small batch, so it should do as well as that.
    Expected: not run yet; docs/diffusion.md has the same in small.
    Cost: 31 million images per seed.
    """
    row = rate_or_noise(find_recipe(FIGURE_NETWORK), FIGURE_LARGE)
    return Study("figure-c2", {FIGURE_NETWORK: row})


def figure_c3() -> Study:
    """The distance of the weights in the first phase, by batch size from 32 to 4096.

    Command: ``ghostbatch study figure-c3``.
    The paper: the slope of the distance against log t is largest at batch 128, and falls above.
    Expected: not run yet; docs/diffusion.md has the same in small.
    Cost: 32 million images per seed: the runs end at the first drop, at epoch 81.
    """
    recipe = find_recipe(FIGURE_NETWORK)
    regime = replace(recipe.regime, epochs=recipe.regime.drops[0][0], drops=())
    row = by_size(replace(recipe, regime=regime), (32, *FIGURE_SIZES, 4096), ("distance",))
    return Study("figure-c3", {FIGURE_NETWORK: row})


def longer() -> Study:
    """The title's claim: a first phase from a quarter to four times as long.

    Command: ``ghostbatch study longer``.
    The paper: training longer at the high rate improves the final accuracy, also while validation
    error is flat; the gain shows at the drop.
    Expected: not run yet; docs/diffusion.md has the same in small.
    Cost: 61 million images per seed.
    """
    row = longer_first_phase(find_recipe(FIGURE_NETWORK), FACTORS)
    return Study("longer", {FIGURE_NETWORK: row})
