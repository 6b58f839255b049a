"""What a study measures besides its runs: each instrument writes one JSON file to its folder."""

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ghostbatch.data import load
from ghostbatch.data.datasets import ImageData
from ghostbatch.data.feed import Normalise
from ghostbatch.diagnostics import BatchedLoss, random_potential
from ghostbatch.diagnostics.separable import descend, hard_margin_in_the_plane
from ghostbatch.diagnostics.walk import random_walk
from ghostbatch.draws import generator
from ghostbatch.errors import InputError, check_choice
from ghostbatch.files import atomic_file, locked
from ghostbatch.recipe import Recipe
from ghostbatch.study.executor import Where
from ghostbatch.train import find_device, read_summary
from ghostbatch.train.state import initial_model

OnProgress = Callable[[int, int], None]
"""Called with the number of steps done and the number of all steps."""

Values = dict[str, Any]
"""What an instrument's file holds."""

PAPERS_RADIUS = 10.0
"""About the largest distance of the paper's runs."""

DIRECTIONS, IMAGES = 1000, 1000

DRAWS = 12
"""Number of separable data sets."""


@dataclass(frozen=True)
class Instrument:
    """A measurement that a study declares; its result is ``name``.json in the study's folder."""

    name: str
    """One of `MEASUREMENTS`."""
    recipe: Recipe | None = None
    """The network and data that it measures, if any."""

    def __post_init__(self) -> None:
        check_choice("instrument", self.name, MEASUREMENTS)

    @property
    def subject(self) -> Values:
        """What it measures, as its file says."""
        if self.recipe is None:
            return {}
        return {name: getattr(self.recipe, name) for name in ("model", "data", "init")}


def walk(_: Instrument, _out: Path, _where: Where, on_progress: OnProgress) -> Values:
    """Simulate a thousand walkers on Brownian potentials, and a thousand on flat lines."""
    walks = {}
    for done, kind in enumerate(("brownian", "flat")):
        walks[kind] = asdict(random_walk(kind, walkers=1000, steps=20_000))  # type: ignore[arg-type]
        on_progress(done + 1, 2)
    return walks


def separable(_: Instrument, _out: Path, _where: Where, on_progress: OnProgress) -> Values:
    """Run gradient descent up to time 1e150 on each of twelve draws of separable data.

    A draw has 40 samples in the plane. One time per factor of ten is kept.
    """
    draws = []
    labels = np.repeat([-1.0, 1.0], 20)
    for seed in range(DRAWS):
        normal = np.random.default_rng(seed).normal(size=(40, 2))
        inputs = normal * [0.5, 2.0] + labels[:, None] * np.array([2.0, 0.0])
        exact = hard_margin_in_the_plane(inputs * labels[:, None])
        found = descend(inputs, labels, until=1e150)
        draws.append(
            {
                "times": found.times[::-5][::-1],
                "distances": found.distances[::-5][::-1],
                "gaps": found.gaps(exact.largest)[::-5][::-1].tolist(),
                "limit": exact.gap_limit,
                "slack": exact.slack,
                "length": 1 / exact.largest,
            }
        )
        on_progress(seed + 1, DRAWS)
    return {"draws": draws}


def potential(chosen: Instrument, out: Path, where: Where, on_progress: OnProgress) -> Values:
    """Measure the loss around the initial weights, and return the samples.

    They reach up to the largest distance of the study's runs. The loss is over the same thousand
    training images, drawn at random, in one batch, without augmentation.
    """
    recipe = chosen.recipe
    if recipe is None:
        raise InputError("recipe", "the potential needs one", "give Instrument a recipe")
    data = load(recipe.data, where.data_dir, holdout=recipe.holdout)
    if not isinstance(data, ImageData):
        raise InputError("data", f"{recipe.data} is not kept in memory", "use another data set")
    device, walked = find_device(where.device), largest_distance(out)
    radius = max(walked, PAPERS_RADIUS)
    with torch.random.fork_rng(devices=[]):
        model = initial_model(recipe, data.info)
    model.to(device)
    images = torch.randperm(len(data.train), generator=generator(0, "potential"))[:IMAGES]
    loss = BatchedLoss(
        data.train.images[images].to(device),
        data.train.labels[images].to(device),
        batch=IMAGES,
        prepare=Normalise(data.mean, data.deviation, device, torch.float32),
    )
    found = random_potential(
        model,
        loss,
        radius=radius,
        samples=DIRECTIONS,
        resume=out / f"{'-'.join(chosen.subject.values())}-{device.type}-{radius:.6f}.scan.json",
        on_sample=lambda done: on_progress(done, DIRECTIONS),
    )
    return {
        **{name: getattr(found, name) for name in ("distances", "losses", "origin", "radius")},
        **{"images": len(images), "walked": walked, **chosen.subject},
    }


def largest_distance(out: Path) -> float:
    """Return the largest distance at the end of the study's finished runs.

    A run whose summary cannot be read does not count; the study reports it as failed.
    """
    largest = 0.0
    for path in out.rglob("summary.json"):
        with suppress(InputError):
            summary = read_summary(path)
            if summary and summary.status == "finished":
                largest = max(largest, summary.distance)
    return largest


MEASUREMENTS: dict[str, Callable[[Instrument, Path, Where, OnProgress], Values]] = {
    "walk": walk,
    "separable": separable,
    "potential": potential,
}
"""Functions of an instrument, the study's folder, where to compute, and on_progress."""


def measure(instrument: Instrument, out: Path, where: Where, on_progress: OnProgress) -> None:
    """Write an instrument's file, unless it is there, of the same recipe and largest distance."""
    target, wanted = out / f"{instrument.name}.json", instrument.subject
    if wanted:
        wanted["walked"] = largest_distance(out)
    try:
        if target.exists():
            found = {"init": "network"} | json.loads(target.read_text())
            if wanted.items() <= found.items():
                return
    except (ValueError, TypeError):
        problem = f"{target} cannot be read"
        raise InputError("folder", problem, "delete it, and run the study again") from None
    with locked(out):
        found = MEASUREMENTS[instrument.name](instrument, out, where, on_progress)
        with atomic_file(target) as file:
            file.write(json.dumps(found).encode() + b"\n")
