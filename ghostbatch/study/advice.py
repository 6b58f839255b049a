"""What to change when the batch grows: each setting with a reason and its evidence.

The evidence is the paper's table 1, as `ghostbatch.study.paper` declares it, and the runs of
docs/results.md. What neither has is said to be not measured.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import inf

from ghostbatch.errors import InputError
from ghostbatch.optim import Rule, lr_scale
from ghostbatch.optim.regime import exact
from ghostbatch.recipe import Plan, Recipe
from ghostbatch.study.paper import table1

CLIP = 5.0
"""Largest L2 norm of the gradient, that of the paper."""

WARMUP = 5
"""Epochs of the large batch to warm up for; at most a tenth of all its epochs."""

MEASURED = {
    "F1": {"SB": 98.76, "LB": 98.26, "+LR": 98.16, "+GBN": 98.36, "+RA": 98.86},
    "C1": {"SB": 87.54, "LB": 81.05, "+LR": 85.35, "+GBN": 85.40, "+RA": 88.10},
    "C3": {"SB": 60.52, "LB": 50.11, "+LR": 57.59, "+GBN": 57.57},
    "ResNet44": {
        **{"SB": 93.01, "LB": 86.00, "+LR": 88.30, "+GBN": 88.57},
        **{"LB, warm-up": 86.10, "+LR, warm-up": 90.19, "+GBN, warm-up": 90.38},
    },
}
"""Mean test accuracy in percent at batch 4096, by network: docs/results.md."""

SOURCES = {
    "paper": "table 1 of Hoffer, Hubara and Soudry 2017: six networks at batch 4096, in points of "
    "validation accuracy",
    "here": "docs/results.md: F1 on MNIST (5 seeds), C1 on CIFAR-10 (3 seeds, +RA one), C3 "
    "on CIFAR-100 (3 seeds) and ResNet44 on CIFAR-10 (one seed a column, two of +GBN with its "
    "warm-up of 5 epochs, three of SB) at batch 4096",
}
"""What the words of the evidence mean."""


@dataclass(frozen=True)
class Advice:
    """A setting, the value to use at the large batch, why, and what speaks for it."""

    setting: str
    value: str
    reason: str
    evidence: str

    def __str__(self) -> str:
        """Return the setting with its value, the reason and the evidence, a line each."""
        return f"{self.setting}: {self.value}\n  why: {self.reason}\n  evidence: {self.evidence}"


def warmed_up(plan: Plan) -> Plan:
    """Return the plan with the warm-up that it needs, if its rate is scaled up."""
    recipe = plan.recipe
    if lr_scale(recipe.batch, recipe.base_batch, recipe.lr_rule) <= 1:
        return plan
    epochs = min(Fraction(WARMUP), exact(plan.seen.epochs) / 10)
    warmup = epochs * plan.held_batch / recipe.batch  # in epochs of the batch that is held
    regime = replace(recipe.regime, warmup=warmup)
    return replace(recipe, regime=regime).plan(plan.samples)


@dataclass(frozen=True)
class MeasuredNoise:
    """A gradient noise scale, and its interval if it is known, in samples."""

    value: float
    interval: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        if not 0 < self.value < inf:
            problem = f"{self.value:g} is not a finite number above 0"
            raise InputError("noise_scale", problem, "measure it over more updates")
        low, high = self.interval or (self.value, self.value)
        if not 0 <= low <= self.value <= high:
            problem = f"{low:g} to {high:g} does not contain the noise scale {self.value:g}"
            raise InputError("interval", problem, "give LOW,HIGH, for example 800,1300")

    def __str__(self) -> str:
        """Return the noise scale and its interval as text."""
        ends = ", ".join(map(_samples, self.interval or ()))
        return f"{_samples(self.value)} samples{ends and f' [{ends}]'}"


def efficiency(batch: int, noise_scale: float) -> float:
    """Return the loss decrease per image at a batch, as a fraction of that at small batches.

    >>> efficiency(1000, noise_scale=1000)
    0.5
    """
    return 1 / (1 + batch / noise_scale)


def images_factor(batch: int, base_batch: int, noise_scale: float) -> float:
    """Return the images to a training loss at a batch, as a factor of those at ``base_batch``.

    Images go as 1 + batch / noise_scale. Updates are images / batch.

    >>> images_factor(4096, 128, noise_scale=1000) == (1 + 4.096) / (1 + 0.128)
    True
    >>> images_factor(4096, 128, inf), images_factor(4096, 128, 0)
    (1.0, 32.0)
    """
    return (noise_scale + batch) / (noise_scale + base_batch) if noise_scale < inf else 1.0


def advice_for(original: Plan, adapted: Plan, noise: MeasuredNoise | None = None) -> list[Advice]:
    """Return what to change to go from one plan to the other, with reasons and evidence.

    With a noise scale, the first advice says whether the large batch pays.
    """
    clipping = Advice(
        "clipping",
        f"L2 norm of the whole gradient, at most {CLIP:g}",
        "it acts mostly in the first updates, like a warm-up, says the paper",
        "the paper clips in every column, so no figure shows its effect by itself",
    )
    advice = [_rate(original, adapted), _warmup(adapted), _ghost(adapted)]
    advice += [_epochs(original, adapted), clipping]
    return advice if noise is None else [batch_advice(adapted.recipe, noise), *advice]


def batch_advice(recipe: Recipe, noise: MeasuredNoise) -> Advice:
    """Return whether the batch of a recipe pays, compared with its base_batch."""
    batch, base = recipe.batch, recipe.base_batch
    times = batch / noise.value
    large, small = (100 * efficiency(each, noise.value) for each in (batch, base))
    scales = (noise.value, *(noise.interval or ())[::-1])  # images fall as the scale grows
    images = [images_factor(batch, base, scale) for scale in scales]
    updates = [factor * base / batch for factor in images]
    return Advice(
        "batch",
        f"{batch:,} is {times:.3g} times the noise scale of {noise}; batches up to the scale pay",
        f"to the same training loss it takes {_factor(updates)} times the updates and "
        f"{_factor(images)} times the images of batch {base:,}: updates go as 1 + B_noise / B, and "
        f"images as 1 + B / B_noise, so each image does {large:.3g} % of what it does in the "
        f"smallest batches ({small:.3g} % at {base:,})",
        "McCandlish et al. 2018, An empirical model of large-batch training: a model of the "
        "training loss at tuned rates, not of test accuracy; the noise scale grows during "
        "training, so a larger batch pays later than at the start; not tested here",
    )


def _factor(values: Sequence[float]) -> str:
    """Return a factor, and its interval if there is one, as text."""
    first, *ends = (f"{value:.3g}" for value in values)
    return f"{first} [{', '.join(ends)}]" if ends else first


def _samples(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def _rate(original: Plan, adapted: Plan) -> Advice:
    batches = f"{adapted.recipe.batch} / {adapted.recipe.base_batch}"
    reasons: dict[Rule, str] = {
        "sqrt": f"every rate times the square root of {batches} keeps the covariance of an update",
        "linear": f"every rate times {batches} keeps the mean of an update, not its covariance",
        "none": "the rates as they were tuned for the small batch",
    }
    rule = adapted.recipe.lr_rule
    drops = "".join(f", {lr:.4g} from epoch {float(at):.4g}" for at, lr, *_ in adapted.seen.drops)
    return Advice(
        "learning rate",
        f"{adapted.regime.lr:.4g}{drops} ({original.regime.lr:.4g} before)",
        reasons[rule],
        f"{_evidence('LB', '+LR')}, with warm-up {_change('LB, warm-up', '+LR, warm-up')}"
        if rule == "sqrt"
        else "not measured here; --lr-rule sqrt is the paper's",
    )


def _warmup(adapted: Plan) -> Advice:
    epochs = float(adapted.seen.warmup)
    if not epochs:
        return Advice("warm-up", "none", "the rate is not scaled up", _here("LB", "LB, warm-up"))
    short = ", a tenth of the run" if epochs < WARMUP else ""
    return Advice(
        "warm-up",
        f"{epochs:.4g} epochs{short}, linear from 0",
        "at the scaled rate the first updates do damage that takes many epochs to repair",
        f"{_here('+LR', '+LR, warm-up')}, {_here('+GBN', '+GBN, warm-up')}; the 5 epochs were "
        "chosen on the same test set; other lengths, and held updates or rates, are not measured"
        if adapted.recipe.lr_rule == "sqrt"
        else "not measured here at this rate; with the square-root rule, "
        f"{_change('+LR', '+LR, warm-up')}",
    )


def _ghost(adapted: Plan) -> Advice:
    size = adapted.recipe.ghost
    value = f"{size} samples, {adapted.ghosts} ghosts a batch" if size else "plain batch norm"
    reason = (
        "each ghost is normalised by itself, with the noise that a small batch's statistics have"
    )
    return Advice(
        "ghost",
        value,
        reason if size else f"--ghost auto has ghosts: {reason}",
        f"{_evidence('+LR', '+GBN')}, with warm-up {_change('+LR, warm-up', '+GBN, warm-up')}, of "
        "which two seeds have a deviation of 0.35",
    )


def _epochs(original: Plan, adapted: Plan) -> Advice:
    recipe = adapted.recipe
    ratio = recipe.batch / recipe.base_batch
    before, after = (f"{float(plan.seen.epochs):,.6g}" for plan in (original, adapted))
    if recipe.hold == "updates":
        return Advice(
            "epochs",
            f"{after}, with the updates of {before} epochs at batch {recipe.base_batch}",
            f"the paper traces the gap to fewer updates; this costs {ratio:.4g} times the images, "
            f"and --hold epochs keeps {before} epochs",
            _evidence("SB", "+RA"),
        )
    if recipe.hold == "rate":
        factor = lr_scale(recipe.batch, recipe.base_batch, recipe.lr_rule)
        return Advice(
            "epochs",
            f"{after}, with {1 / factor:.4g} times the updates",
            "the sum of the learning rates stays, but for the warm-up; this costs "
            f"{ratio / factor:.4g} times the images, and --hold epochs keeps {before} epochs",
            "not measured here, and no column of the paper; "
            f"with held updates {_gains('SB', '+RA')} (paper, SB to +RA)",
        )
    return Advice(
        "epochs",
        f"{after}, with {1 / ratio:.4g} times the updates",
        "as many images as before; --hold updates trains longer, which closes the paper's gap",
        f"{_paper('SB', '+GBN')}, and with held updates {_gains('SB', '+RA')}",
    )


def _evidence(before: str, after: str) -> str:
    return f"{_paper(before, after)}; {_here(before, after)}"


def _paper(before: str, after: str) -> str:
    return f"paper, {before} to {after}: {_gains(before, after)}"


def _here(before: str, after: str) -> str:
    return f"here, {before} to {after}: {_change(before, after)}"


def _gains(before: str, after: str) -> str:
    """Return how the paper's accuracies change from one column to another."""
    gains = [row.paper[after] - row.paper[before] for row in table1().rows.values()]
    return f"{min(gains):+.2f} to {max(gains):+.2f}"


def _change(before: str, after: str) -> str:
    """Return our own accuracies in two columns, of the networks that have both."""
    found = (
        f"{network} {means[before]:.2f} to {means[after]:.2f}"
        for network, means in MEASURED.items()
        if before in means and after in means
    )
    return f"{', '.join(found)} %"
