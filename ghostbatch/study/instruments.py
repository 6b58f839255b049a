"""What a study measures besides its runs: each instrument leaves one JSON file in its folder."""

import json
from collections.abc import Callable
from dataclasses import asdict
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
from ghostbatch.files import atomic_file, locked
from ghostbatch.study.recipes import find_recipe
from ghostbatch.train import read_summary
from ghostbatch.train.state import initial_model

OnProgress = Callable[[int, int], None]
"""Called with what is done and what there is to do."""

PAPERS_RADIUS = 10.0
"""About the largest distance of the paper's runs."""

DIRECTIONS, IMAGES = 1000, 1000


def walk(out: Path, on_progress: OnProgress) -> dict[str, Any]:
    """A thousand walkers on Brownian potentials, and a thousand on flat lines."""
    del out
    walks = {}
    for done, kind in enumerate(("brownian", "flat")):
        walks[kind] = asdict(random_walk(kind, walkers=1000, steps=20_000))  # type: ignore[arg-type]
        on_progress(done + 1, 2)
    return walks


def separable(out: Path, on_progress: OnProgress) -> dict[str, Any]:
    """Gradient descent on 40 samples of two classes in the plane, to a time beyond counting.

    Of four draws this is the one that comes closest to its limit in that time: the gap's exponent
    is -1.06 in the later half, and between -0.8 and -3.6 with the others.
    """
    del out
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
    """The shortest w with z.w >= 1 for all points z: p / |p|^2 for the hull's point nearest to 0.

    In the plane that point lies on a segment between two points, so all pairs are tried.

    >>> hard_margin_in_the_plane(np.array([[1.0, 1.0], [1.0, -1.0], [3.0, 0.0]])).tolist()
    [1.0, 0.0]
    """
    ends = signed[None] - signed[:, None]
    lengths = np.maximum((ends**2).sum(-1), np.finfo(float).tiny)
    along = np.clip(-(signed[:, None] * ends).sum(-1) / lengths, 0, 1)
    points = (signed[:, None] + along[..., None] * ends).reshape(-1, 2)
    nearest = points[np.argmin((points**2).sum(-1))]
    return nearest / (nearest**2).sum()  # type: ignore[no-any-return]


def potential(out: Path, on_progress: OnProgress) -> dict[str, Any]:
    """The loss around the initial weights of F1 (seed 0), as far as any run of the study walked.

    Over the first thousand training digits in one batch, without augmentation.
    """
    recipe = find_recipe("f1-digits")
    data = load(recipe.data)
    if not isinstance(data, ImageData):
        raise TypeError(f"{recipe.data} is no set of tensors")
    walked = _walked(out)
    radius = max(walked, PAPERS_RADIUS)
    device = torch.device("cpu")
    with torch.random.fork_rng(devices=[]):
        model = initial_model(recipe, data.info)
    chosen = torch.randperm(len(data.train), generator=generator(0, "potential"))[:IMAGES]
    loss = BatchedLoss(
        data.train.images[chosen],
        data.train.labels[chosen],
        batch=IMAGES,
        prepare=Normalise(data.mean, data.deviation, device, torch.float32),
    )
    found = random_potential(
        model,
        loss,
        radius=radius,
        samples=DIRECTIONS,
        resume=out / f"potential-{radius:.6f}.scan.json",  # another radius is another scan
        on_sample=lambda done: on_progress(done, DIRECTIONS),
    )
    return {
        **{name: getattr(found, name) for name in ("distances", "losses", "origin", "radius")},
        "walked": walked,
        "images": IMAGES,
    }


def _walked(out: Path) -> float:
    """The largest distance of the study's runs."""
    summaries = (read_summary(path) for path in out.rglob("summary.json"))
    return max((s.distance for s in summaries if s and s.status == "finished"), default=0.0)


INSTRUMENTS: dict[str, Callable[[Path, OnProgress], dict[str, Any]]] = {
    "walk": walk,
    "separable": separable,
    "potential": potential,
}


def measure(name: str, out: Path, on_progress: OnProgress) -> None:
    """Use an instrument, unless its file is there and of the runs that are."""
    target, walked = out / f"{name}.json", _walked(out)
    if target.exists() and json.loads(target.read_text()).get("walked", walked) == walked:
        return
    with locked(out):
        found = INSTRUMENTS[name](out, on_progress)
        with atomic_file(target) as file:
            file.write(json.dumps(found).encode() + b"\n")
