"""What a study measures besides its runs: each instrument writes one JSON file to its folder."""

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ghostbatch.data import fingerprint_of, load
from ghostbatch.data.datasets import ImageData
from ghostbatch.diagnostics import largest_eigenvalue, random_potential
from ghostbatch.diagnostics.separable import descend, hard_margin_in_the_plane
from ghostbatch.diagnostics.walk import random_walk
from ghostbatch.errors import InputError, check_choice
from ghostbatch.files import atomic_file, locked
from ghostbatch.recipe import Recipe
from ghostbatch.study.executor import Where
from ghostbatch.train import Summary, find_device, read_summary
from ghostbatch.train.header import check_data
from ghostbatch.train.load import read_run
from ghostbatch.train.measure import training_loss
from ghostbatch.train.state import initial_model, parameter_dtype

OnProgress = Callable[[int, int], None]
"""Called with the number of steps done and the number of all steps."""

Values = dict[str, Any]
"""What an instrument's file holds."""

PAPERS_RADIUS = 10.0
"""About the largest distance of the paper's runs."""

DIRECTIONS = 1000

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
    """Measure the loss around the initial weights, as far out as the study's runs went."""
    recipe = chosen.recipe
    if recipe is None:
        raise InputError("recipe", "the potential needs one", "give Instrument a recipe")
    data = _load(recipe, where)
    device, walked = find_device(where.device), largest_distance(out)
    radius = max(walked, PAPERS_RADIUS)
    with torch.random.fork_rng(devices=[]):
        model = initial_model(recipe, data.info)
    model.to(device)
    loss = training_loss(data, device, torch.float32)
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
        **{"images": len(loss.labels), "walked": walked, **chosen.subject},
    }


def sharpness(_: Instrument, out: Path, where: Where, on_progress: OnProgress) -> Values:
    """Measure the sharpness at the end of every finished run of the study.

    Norm layers use the statistics of one batch of images, whatever the batch and the ghosts of the
    run. The file is written after each run, and what it holds is not measured again.
    """
    ends, target = losses_at_ends(out), out / "sharpness.json"
    try:
        known = json.loads(target.read_text())["runs"] if target.exists() else {}
        found = {place: run for place, run in known.items() if run["loss"] == ends.get(place)}
    except (ValueError, TypeError, KeyError, AttributeError):
        raise _unreadable(target) from None
    for place, end in ends.items():
        if place not in found:
            found[place] = {"loss": end, **_sharpness_of(out / place, where)}
            _write(target, {"runs": found})
        on_progress(len(found), len(ends))
    return {"ends": ends, "runs": found}


def _sharpness_of(folder: Path, where: Where) -> Values:
    """Return both measures of the sharpness of a run's network, and its high learning rate."""
    run, device = read_run(folder), find_device(where.device)
    data = _load(run.recipe, where)
    check_data(run.header, fingerprint_of(data))
    model, loss = run.model.to(device), training_loss(data, device, parameter_dtype(run.recipe))
    return {
        "eigenvalue": asdict(largest_eigenvalue(model, loss)),
        "relative": asdict(largest_eigenvalue(model, loss, relative=True)),
        "rate": run.plan.regime.lr,
        "images": len(loss.labels),
    }


def _load(recipe: Recipe, where: Where) -> ImageData:
    """Return the data set of a recipe; refuse one that is not kept in memory."""
    data = load(recipe.data, where.data_dir, **recipe.data_options)
    if not isinstance(data, ImageData):
        raise InputError("data", f"{recipe.data} is not kept in memory", "use another data set")
    return data


def finished_runs(out: Path) -> dict[str, Summary]:
    """Return the summaries of the study's finished runs, by their folders in the study's."""
    found = {}
    for path in sorted(out.rglob("summary.json")):
        with suppress(InputError):  # the study reports an unreadable one as failed
            summary = read_summary(path)
            if summary and summary.status == "finished":
                found[path.parent.relative_to(out).as_posix()] = summary
    return found


def largest_distance(out: Path) -> float:
    """Return the largest distance at the end of the study's finished runs."""
    return max((summary.distance for summary in finished_runs(out).values()), default=0.0)


def losses_at_ends(out: Path) -> dict[str, float]:
    """Return the losses at the end of the study's finished runs; they tell ends apart."""
    return {place: summary.loss for place, summary in finished_runs(out).items()}


MEASUREMENTS: dict[str, Callable[[Instrument, Path, Where, OnProgress], Values]] = {
    "walk": walk,
    "separable": separable,
    "potential": potential,
    "sharpness": sharpness,
}
"""Functions of an instrument, the study's folder, where to compute, and on_progress."""


def measure(instrument: Instrument, out: Path, where: Where, on_progress: OnProgress) -> None:
    """Write an instrument's file, unless there is one of the same recipe and the same runs."""
    target, wanted = out / f"{instrument.name}.json", _wanted(instrument, out)
    try:
        if target.exists() and wanted.items() <= json.loads(target.read_text()).items():
            return
    except (ValueError, TypeError, AttributeError):
        raise _unreadable(target) from None
    with locked(out):
        _write(target, MEASUREMENTS[instrument.name](instrument, out, where, on_progress))


def _wanted(instrument: Instrument, out: Path) -> Values:
    """Return what an instrument's file says if it need not be measured again."""
    if instrument.name == "sharpness":
        return {"ends": losses_at_ends(out)}
    if instrument.recipe is None:
        return {}
    return {**instrument.subject, "walked": largest_distance(out)}


def _unreadable(target: Path) -> InputError:
    remedy = "delete it, and run the study again"
    return InputError("folder", f"{target} cannot be read", remedy)


def _write(target: Path, values: Values) -> None:
    with atomic_file(target) as file:
        file.write(json.dumps(values).encode() + b"\n")
