"""The reference of a run with hold "distance": its weight distance at each drop of the rate."""

from itertools import accumulate
from math import inf
from pathlib import Path
from typing import NamedTuple

from ghostbatch.diagnostics import distances_at
from ghostbatch.errors import InputError
from ghostbatch.recipe import LATEST, Plan, Recipe
from ghostbatch.train.header import read_header
from ghostbatch.train.record import read_summary

SETTLED = 0.05
"""Growth of the reference's distance in a phase below which the phase has its updates instead."""


class DropTargets(NamedTuple):
    """When the rate drops: one value per drop."""

    reached: tuple[float, ...]
    """The weight distance; infinity if the reference's distance hardly grew in that phase."""
    longest: tuple[int, ...]
    """The largest number of updates since the drop before."""

    @classmethod
    def unknown(cls, plan: Plan) -> "DropTargets":
        """Return the targets of a run whose reference has not been read: only upper bounds."""
        phases = plan.phases[:-1]
        return cls((inf,) * len(phases), tuple(LATEST * phase for phase in phases))


def read_drop_targets(plan: Plan) -> DropTargets:
    """Read the reference run of a plan with hold "distance"; return when the rate must drop.

    At a low rate the distance hardly grows, and weight decay may shrink it. Such a phase is as long
    as the reference's instead.
    """
    folder = Path(plan.recipe.reference or "")
    _check(folder, plan)
    phases = plan.phases[:-1]
    ends = list(accumulate(phases))
    reached, longest, farthest = [], [], 0.0
    for distance, phase in zip(distances_at(folder / "metrics.jsonl", ends), phases, strict=True):
        growing = distance > farthest * (1 + SETTLED)
        reached.append(distance if growing else inf)
        longest.append(LATEST * phase if growing else phase)
        farthest = max(farthest, distance)
    return DropTargets(tuple(reached), tuple(longest))


def _check(folder: Path, plan: Plan) -> None:
    """Refuse a reference whose distances do not fit this plan."""
    if not (folder / "run.json").exists():
        raise InputError("reference", f"{folder} holds no run", "name the folder of one")
    summary = read_summary(folder / "summary.json")
    if summary is None or summary.status != "finished":
        raise InputError("reference", f"{folder} has not finished", "run it to its end first")
    header = read_header(folder)
    recipe = Recipe.from_dict(header["recipe"])
    for field in ("model", "data", *recipe.data_options):
        if getattr(recipe, field) != getattr(plan.recipe, field):
            raise InputError(
                "reference", f"{folder} has another {field}", f"name a run of the same {field}"
            )
    if recipe.hold == "distance":
        raise InputError(
            "reference", f"{folder} follows another run", f"name that one: {recipe.reference}"
        )
    theirs = recipe.plan(header["samples"]).phases
    if theirs != plan.phases:
        raise InputError(
            "reference",
            f"{folder} has phases of {theirs} updates, but this recipe needs {plan.phases}",
            "name a run of the same regime with that batch or held updates",
        )
