"""All studies by name, and those on the embedded digits."""

from collections.abc import Callable
from dataclasses import replace

from ghostbatch.errors import check_choice
from ghostbatch.optim import Regime
from ghostbatch.recipes import find_recipe
from ghostbatch.study import paper
from ghostbatch.study.ablation import ablation
from ghostbatch.study.beyond import beyond, beyond_search
from ghostbatch.study.calibration import calibration
from ghostbatch.study.controls import controls
from ghostbatch.study.declare import Study
from ghostbatch.study.instruments import Instrument
from ghostbatch.study.rows import (
    by_size,
    drop_by_distance,
    longer_first_phase,
    paper_row,
    rate_or_noise,
    without_weight_decay,
)
from ghostbatch.study.targets import targets


def quick() -> Study:
    """The paper's five columns in small: F1 on the embedded digits, batch 32 against 512.

    Command: ``ghostbatch study quick``.
    Expected: SB 95.8, LB 91.1, +LR 94.1, +GBN 94.7, +RA 95.2 %, each within 0.7 over seeds, and
    within 0.4 of that with recalibrated statistics.
    Cost: 1:58 minutes on two cores; most of it for +RA, which sees the data 144 times.

    Every column has 70 updates or more, which leave 0.06 % of the initial running statistics. The
    rate was chosen on held-out digits, for SB alone: docs/paper.md.
    """
    return Study("quick", {"f1-digits": paper_row(find_recipe("f1-digits"), large=512, ghost=32)})


def walk() -> Study:
    """Random walkers on a rough line, where distance grows as (log t)^2, and on a flat one.

    Command: ``ghostbatch study walk``.
    Expected: exponents of log t near 2 on the rough line, and sqrt t on the flat one.
    Cost: seconds.
    """
    return Study("walk", instruments=(Instrument("walk"),))


def separable() -> Study:
    """Logistic regression on separable data: w(t) grows as log t times the hard-margin vector.

    Command: ``ghostbatch study separable``.
    Expected: w(t) / log t approaches a vector, and the gap of its margin shrinks as 1 / log t.
    Cost: seconds.
    """
    return Study("separable", instruments=(Instrument("separable"),))


def diffusion() -> Study:
    """How far weights walk, in small: figures 2, B and C2 of the paper, and its title's claim.

    Command: ``ghostbatch study diffusion``.
    Compares: distance by batch size before and after +LR and +GBN; the same without weight decay;
    the scaled rate against noise, with controls; drops decided by distance against +RA; the first
    phase from a quarter to four times as long, with the same later phases. Instrument: the loss
    around the initial weights.
    Expected: docs/diffusion.md.
    Cost: about 18 minutes on two idle cores.
    """
    regime = Regime(lr=0.05, epochs=4, drops=((2, 0.005), (3, 0.0005)))
    base = replace(find_recipe("f1-digits"), regime=regime)
    high = replace(base, regime=Regime(lr=base.regime.lr, epochs=16))
    sizes = (8, 32, 128, 512, 1024)
    rows = {
        "before": by_size(high, sizes),
        "after": by_size(replace(high, lr_rule="sqrt", ghost=32), sizes),
        "no weight decay": by_size(without_weight_decay(high), (32, 1024)),
        "rate or noise": rate_or_noise(
            replace(high, regime=replace(high.regime, drops=((8, 0.005),))), large=1024
        ),
        "by distance": drop_by_distance(base, large=256, ghost=32),
        "longer": longer_first_phase(base, paper.FACTORS),
    }
    return Study("diffusion", rows, instruments=(Instrument("potential", base),))


def sharpness() -> Study:
    """How sharp the minima are in which the paper's five columns end, in small.

    Command: ``ghostbatch study sharpness``.
    Instrument: the largest eigenvalue of the Hessian at the end of every run, plain and relative to
    the weights, and the plain one times the high learning rate.
    Expected: eigenvalues of 3.7 for SB, 7.4 for LB, 4.4 for +LR, 5.2 for +GBN and 0.04 for +RA; the
    relative ones are in the same order (docs/noise-scale.md).
    Cost: that of the study quick, and 4 minutes of one core for the eigenvalues.
    """
    rows = {"f1-digits": paper_row(find_recipe("f1-digits"), large=512, ghost=32)}
    return Study("sharpness", rows, instruments=(Instrument("sharpness"),))


def columns(recipe: str, batch: int, ghost: int) -> Study:
    """SB, LB, +LR, +GBN and +RA of any recipe.

    Command: ``ghostbatch study columns RECIPE --batch N --ghost G``.
    Cost: 4 + N / base_batch times that of the recipe, per seed.
    """
    return Study("columns", {recipe: paper_row(find_recipe(recipe), batch, ghost)})


STUDIES: dict[str, Callable[[], Study]] = {
    make.__name__.replace("_", "-"): make
    for make in (
        *(quick, paper.table1, paper.table2, paper.figure1, paper.figure2, paper.figure3),
        *(paper.figure_b, paper.figure_c1, paper.figure_c2, paper.figure_c3, paper.longer),
        *(controls, ablation, beyond_search, beyond, targets),
        *(calibration, diffusion, sharpness, walk, separable),
    )
}
"""Studies without arguments; `columns` takes a recipe."""


def find_study(name: str) -> Study:
    """Return the study of that name; refuse an unknown name."""
    check_choice("study", name, STUDIES)
    return STUDIES[name]()
