"""``ghostbatch advise``: what to change in a script of one's own when the batch grows."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, Literal

import tyro

from ghostbatch.cli.flags import parse
from ghostbatch.cli.noise import NoiseOptions
from ghostbatch.cli.plan import find_ghost, plan_data
from ghostbatch.errors import InputError
from ghostbatch.optim import Drop, Epochs, Regime, Rule
from ghostbatch.optim.adaptation import HeldTime
from ghostbatch.recipe import Plan, Recipe
from ghostbatch.study.advice import CLIP, SOURCES, advice_for, warmed_up

MANY = 10**9
"""Training images to plan with where their number is not given; no update is printed then."""


@dataclass(frozen=True, kw_only=True)
class AdviseOptions:
    """Print what to change in your script for a larger batch, with reasons and evidence."""

    batch: int
    """Samples per update that you want, over all devices."""
    base_batch: int
    """The batch that your regime was tuned for."""
    epochs: Epochs
    """Epochs of your regime."""
    lr: float
    """Learning rate at the start of your regime."""
    drops: tuple[Drop, ...] = ()
    """Later learning rates of your regime, each with its epoch."""
    lr_rule: Rule = "sqrt"
    """How the learning rate grows with the batch."""
    ghost: int | Literal["auto"] | None = "auto"
    """Samples per ghost; auto is base_batch, at most 128; None is plain batch norm."""
    hold: HeldTime = "updates"
    """What stays the same: the updates, the epochs, or the sum of the learning rates (rate)."""
    samples: int | None = None
    """Training images, to print the number of updates, too."""
    json: bool = False
    """Print JSON instead of lines."""
    noise: Annotated[NoiseOptions, tyro.conf.arg(name="")] = field(default_factory=NoiseOptions)


def command(argv: Sequence[str]) -> None:
    """Print each setting of the large batch, why, and what was measured."""
    options = parse(AdviseOptions, argv, "advise")
    original, adapted = _plans(options)
    advice = advice_for(original, adapted, options.noise.measured)
    data: dict[str, Any] = {
        "original": _data(original, options),
        "adapted": _data(adapted, options),
    }
    if options.json:
        data |= {"advice": [asdict(each) for each in advice], "sources": SOURCES}
        print(json.dumps(data, indent=2))
        return
    print(f"from batch {options.base_batch:,} to batch {options.batch:,}")
    for each in advice:
        print(f"\n{each}")
    if options.samples is not None:
        print(f"\nupdates: {original.updates:,} before, {adapted.updates:,} now")
    print("\n" + "\n".join(f"{name}: {source}" for name, source in SOURCES.items()))


def _plans(options: AdviseOptions) -> tuple[Plan, Plan]:
    """Return the plans of the regime at both batches; the warm-up is that of the large one."""
    if options.samples is not None and options.samples < options.batch:
        problem = f"{options.samples} are fewer than batch {options.batch}"
        raise InputError("samples", problem, "give the size of your training set")
    if options.base_batch < 2:
        raise InputError("base_batch", f"{options.base_batch} is below 2", "use 2 or more")
    try:
        return _make_plans(options)
    except InputError as error:  # flags here are called without what they are part of
        field, remedy = (text.replace("regime.", "") for text in (error.field, error.remedy))
        raise InputError(field, error.problem, remedy) from None


def _make_plans(options: AdviseOptions) -> tuple[Plan, Plan]:
    regime = Regime(lr=options.lr, epochs=options.epochs, drops=options.drops)
    recipe = Recipe(  # no advice depends on the network and the data that stand in here
        model="f1",
        data="digits",
        batch=options.base_batch,
        base_batch=options.base_batch,
        regime=regime,
    )
    if options.batch <= options.base_batch:
        problem = f"{options.batch} is not above base_batch {options.base_batch}"
        raise InputError("batch", problem, "give a larger one: the evidence is of larger batches")
    ghost = options.ghost and find_ghost(options.ghost, recipe, options.batch)
    adapted = recipe.large(options.batch, options.lr_rule, ghost, options.hold)
    samples = MANY if options.samples is None else options.samples
    return recipe.plan(samples), warmed_up(adapted.plan(samples))


def _data(plan: Plan, options: AdviseOptions) -> dict[str, Any]:
    """Return what ``ghostbatch plan`` prints of a plan, its warm-up and its clipping."""
    data = {**plan_data(plan), "warmup": float(plan.seen.warmup), "clip": CLIP}
    return data if options.samples is not None else {**data, "updates": None, "drop_updates": None}
