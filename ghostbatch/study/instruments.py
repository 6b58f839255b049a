"""What a study measures besides its runs: each instrument writes one JSON file to its folder."""

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ghostbatch.data import load
from ghostbatch.data.datasets import ImageData
from ghostbatch.data.feed import Normalise
from ghostbatch.diagnostics import BatchedLoss, random_potential
from ghostbatch.diagnostics.separable import descend
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


@dataclass(frozen=True)
class Instrument:
    """A measurement that a study declares; its result is ``name``.json in the study's folder."""

    name: str
    """One of `MEASUREMENTS`."""
    recipe: Recipe | None = None
    """The network and data that it measures, if any."""

    def __post_init__(self) -> None:
        check_choice("instrument", self.name, MEASUREMENTS)


def walk(_recipe: Recipe | None, _out: Path, _where: Where, on_progress: OnProgress) -> Values:
    """Simulate a thousand walkers on Brownian potentials, and a thousand on flat lines."""
    walks = {}
    for done, kind in enumerate(("brownian", "flat")):
        walks[kind] = asdict(random_walk(kind, walkers=1000, steps=20_000))  # type: ignore[arg-type]
        on_progress(done + 1, 2)
    return walks


def separable(_recipe: Recipe | None, _out: Path, _where: Where, on_progress: OnProgress) -> Values:
    """Run gradient descent on 40 separable samples in the plane, up to time 1e40.

    Of four random samples this one comes closest to its limit by then: the exponent of the gap is
    -1.06 in the later half, and between -0.8 and -3.6 for the others.
    """
    draw = np.random.default_rng(3)
    labels = np.repeat([-1.0, 1.0], 20)
    inputs = draw.normal(size=(40, 2)) * [0.5, 2.0] + labels[:, None] * np.array([2.0, 0.0])
    found = descend(inputs, labels, until=1e40)
    on_progress(1, 1)
    vector = hard_margin_in_the_plane(inputs * labels[:, None])
    return {
        "times": found.times,
        "distances": found.distances,
        "over_log": found.over_log().tolist(),
        "gaps": found.gaps(1 / float(np.linalg.norm(vector))).tolist(),
        "vector": vector.tolist(),
    }


def hard_margin_in_the_plane(signed: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the shortest w with z.w >= 1 for all points z.

    It is p / |p|^2, where p is the point of the convex hull nearest to 0. In the plane p lies on a
    segment between two points, so this function tries all pairs.

    >>> hard_margin_in_the_plane(np.array([[1.0, 1.0], [1.0, -1.0], [3.0, 0.0]])).tolist()
    [1.0, 0.0]
    """
    ends = signed[None] - signed[:, None]
    lengths = np.maximum((ends**2).sum(-1), np.finfo(float).tiny)
    along = np.clip(-(signed[:, None] * ends).sum(-1) / lengths, 0, 1)
    points = (signed[:, None] + along[..., None] * ends).reshape(-1, 2)
    nearest = points[np.argmin((points**2).sum(-1))]
    return nearest / (nearest**2).sum()  # type: ignore[no-any-return]


def potential(recipe: Recipe | None, out: Path, where: Where, on_progress: OnProgress) -> Values:
    """Measure the loss around the recipe's initial weights, and return the samples.

    They reach up to the largest distance of the study's runs. The loss is over the same thousand
    training images in one batch, without augmentation.
    """
    if recipe is None:
        raise InputError("recipe", "the potential needs one", "give Instrument a recipe")
    data = load(recipe.data, where.data_dir, holdout=recipe.holdout)
    if not isinstance(data, ImageData):
        raise InputError("data", f"{recipe.data} is not kept in memory", "use another data set")
    device, walked = find_device(where.device), largest_distance(out)
    radius = max(walked, PAPERS_RADIUS)
    with torch.random.fork_rng(devices=[]):
        model = initial_model(recipe, data.info).to(device)
    chosen = torch.randperm(len(data.train), generator=generator(0, "potential"))[:IMAGES]
    loss = BatchedLoss(
        data.train.images[chosen].to(device),
        data.train.labels[chosen].to(device),
        batch=IMAGES,
        prepare=Normalise(data.mean, data.deviation, device, torch.float32),
    )
    found = random_potential(
        model,
        loss,
        radius=radius,
        samples=DIRECTIONS,
        resume=out / f"{recipe.model}-{recipe.data}-{device.type}-{radius:.6f}.scan.json",
        on_sample=lambda done: on_progress(done, DIRECTIONS),
    )
    return {
        **{name: getattr(found, name) for name in ("distances", "losses", "origin", "radius")},
        **{"model": recipe.model, "data": recipe.data, "init": recipe.init},
        **{"images": len(chosen), "walked": walked},
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


MEASUREMENTS: dict[str, Callable[[Recipe | None, Path, Where, OnProgress], Values]] = {
    "walk": walk,
    "separable": separable,
    "potential": potential,
}
"""Functions of an instrument's recipe, the study's folder, where to compute, and on_progress."""


def measure(instrument: Instrument, out: Path, where: Where, on_progress: OnProgress) -> None:
    """Write an instrument's file, unless it is there, of the same recipe and largest distance."""
    target, recipe = out / f"{instrument.name}.json", instrument.recipe
    wanted: Values = {}
    if recipe is not None:
        wanted = {"walked": largest_distance(out), "model": recipe.model, "data": recipe.data}
    try:
        if target.exists() and wanted.items() <= json.loads(target.read_text()).items():
            return
    except (ValueError, AttributeError):
        problem = f"{target} cannot be read"
        raise InputError("folder", problem, "delete it, and run the study again") from None
    with locked(out):
        found = MEASUREMENTS[instrument.name](recipe, out, where, on_progress)
        with atomic_file(target) as file:
            file.write(json.dumps(found).encode() + b"\n")
