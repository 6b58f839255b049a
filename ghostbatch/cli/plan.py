"""``ghostbatch plan``: a recipe adapted to another batch, next to the original."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Any, Literal

import tyro

from ghostbatch.cli.about import about_all, about_one
from ghostbatch.cli.flags import parse_words, print_help, take_name
from ghostbatch.cli.noise import NoiseOptions
from ghostbatch.cli.words import sort_words
from ghostbatch.data import find_info
from ghostbatch.errors import InputError
from ghostbatch.optim import Rule
from ghostbatch.recipe import Hold, Plan, Recipe
from ghostbatch.recipes import RECIPES, find_recipe
from ghostbatch.report.table import Table, show_batches, show_rates
from ghostbatch.report.terminal import plain_console, print_table
from ghostbatch.study.advice import batch_advice


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Adapt a recipe to another batch, and print it next to the original."""

    batch: int
    """Samples per update of the adapted recipe, over all ranks."""
    lr_rule: Rule = "sqrt"
    """How the learning rate grows with the batch."""
    ghost: int | Literal["auto"] | None = "auto"
    """Samples per ghost; auto is base_batch, at most 128; None is plain batch norm."""
    hold: Hold = "updates"
    """What stays the same: updates, epochs, the distance walked, or the sum of learning rates."""
    reference: str | None = None
    """With hold distance: the folder of the run whose distances to follow."""
    grow: int | None = None
    """With hold epochs: the largest batch to which the batch grows where the rate would drop."""
    json: bool = False
    """Print JSON instead of a table."""
    noise: Annotated[NoiseOptions, tyro.conf.arg(name="")] = field(default_factory=NoiseOptions)


def command(argv: Sequence[str]) -> None:
    """Print the original and the adapted recipe side by side."""
    words = sort_words(PlanOptions, argv, "plan")
    name = take_name(words, "recipe", RECIPES)
    if name is None:
        example = "For example: ghostbatch plan f1-digits --batch 1024"
        print_help(PlanOptions, "plan RECIPE", about_all(PlanOptions, "RECIPE", RECIPES, example))
    recipe = find_recipe(name)
    about = about_one(PlanOptions, name, RECIPES)
    options = parse_words(PlanOptions, words, f"plan {name}", about=about)
    ghost = options.ghost and find_ghost(options.ghost, recipe, options.batch)
    adapted = recipe.large(options.batch, options.lr_rule, ghost, options.hold, options.reference)
    adapted = replace(adapted, grow=options.grow)
    samples = find_info(recipe.data).samples
    plans = {"original": recipe.plan(samples), "adapted": adapted.plan(samples)}
    noise = options.noise.measured
    if noise and options.grow is not None:
        problem = "the advice is for one batch, and this one grows"
        raise InputError("noise_scale", problem, "leave it out, or grow")
    advice = [batch_advice(adapted, noise)] if noise else []
    if options.json:
        data: dict[str, Any] = {which: plan_data(plan) for which, plan in plans.items()}
        data |= {"advice": [asdict(each) for each in advice]} if advice else {}
        print(json.dumps(data, indent=2))
        return
    shown = [_plan_lines(plan) for plan in plans.values()]
    lines = [(title, *(texts[title] for texts in shown)) for title in shown[0]]
    print_table(Table(("", *plans), lines, name), plain_console(), gap=2)
    for each in advice:
        print(f"\n{each}")


def find_ghost(ghost: int | Literal["auto"], recipe: Recipe, batch: int) -> int:
    """Return a ghost size as it is, or for "auto" that of the recipe at a batch."""
    return min(128, recipe.base_batch, batch) if ghost == "auto" else ghost


def plan_data(plan: Plan) -> dict[str, Any]:
    """Return a plan as ``--json`` prints it."""
    seen = plan.seen
    return {
        "batch": plan.recipe.batch,
        "batches": [size * plan.recipe.batch for size in plan.batches],
        "lr": plan.regime.lr,
        "drops": [[float(epoch), *rates] for epoch, *rates in seen.drops],
        "drop_updates": list(plan.drop_updates),
        "updates": plan.updates,
        "epochs": float(seen.epochs),
        "ghosts": plan.ghosts,
        "ghost": plan.recipe.ghost,
    }


def _plan_lines(plan: Plan) -> dict[str, str]:
    seen, ghost = plan.seen, plan.recipe.ghost
    return {
        "batch": show_batches(plan),
        "learning rate": f"{plan.regime.lr:.4g}",
        "drops (epoch)": ", ".join(f"{d[1]:.4g} ({float(d[0]):.4g})" for d in seen.drops) or "none",
        "rates (update)": show_rates(plan),
        "updates": f"{plan.updates:,}",
        "epochs": f"{float(seen.epochs):.4g}",
        "ghosts": f"{plan.ghosts} of {ghost}" if ghost else "plain batch norm",
    }
