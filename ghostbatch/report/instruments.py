"""Figures of what a study measured besides its runs, from the JSON files in its folder."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np

from ghostbatch.diagnostics import RandomPotential, fit_diffusion
from ghostbatch.errors import InputError
from ghostbatch.report.figures import OTHERS, STYLE, Plot, finish, new_axes

BINS = (10, 20, 50)


def draw_instruments(folder: Path) -> list[Plot]:
    """The figures of every instrument whose file is in ``folder``."""
    plots = []
    for name, draw in DRAW.items():
        source = folder / f"{name}.json"
        if source.exists():
            (folder / "figures").mkdir(exist_ok=True)
            try:
                found = json.loads(source.read_text())
                with mpl.rc_context(STYLE):
                    plots += draw(found, folder / "figures")
            except (ValueError, KeyError, TypeError):
                raise InputError(
                    "folder", f"{source} cannot be read", "delete it, and run the study again"
                ) from None
    return plots


def has_instruments(folder: Path) -> bool:
    """Whether any has left its file."""
    return any((folder / f"{name}.json").exists() for name in DRAW)


def _walk(found: dict[str, Any], folder: Path) -> list[Plot]:
    figure, axes = new_axes("step", "distance (root-mean-square)")
    verdicts = []
    for (kind, walk), colour in zip(found.items(), OTHERS, strict=False):
        t, d = np.array(walk["times"]), np.array(walk["distances"])
        axes.errorbar(t, d, walk["stderrs"], fmt="o", ms=2.5, color=colour, label=kind)
        late = t >= 10  # a walk on a grid is no diffusion in its first steps
        fit = fit_diffusion(t[late].tolist(), d[late].tolist())
        low, high = fit.exponent_interval
        line = np.geomspace(10, t[-1], 100)
        basis: Callable[[np.ndarray], np.ndarray] = np.sqrt
        if fit.better == "log":
            basis = lambda time, p=fit.exponent: np.log(time) ** p  # type: ignore[misc]  # noqa: E731
        b, a = np.polyfit(basis(t[late]), d[late], 1)
        axes.plot(line, a + b * basis(line), color=colour, lw=1)
        verdicts.append(
            f"{kind}: exponent of ln t {fit.exponent:.2f} in [{low:.2f}, {high:.2f}], and of "
            f"ln t and sqrt t {fit.better} t fits better by {fit.aic_margin:.0f} of AIC"
        )
    axes.set_yscale("log")
    axes.legend(loc="upper left")
    caption = (
        "A thousand walkers each on a Brownian potential, where theory has (ln t)^2, and on a flat "
        "line, where it has sqrt t. Lines, from step 10 on: a + b (ln t)^p, or a + b sqrt t where "
        f"that fits better than ln t; intervals are of 95 %. {'; '.join(verdicts)}."
    )
    return [finish(figure, folder, "walk", "Walkers on a rough line and on a flat one", caption)]


def _separable(found: dict[str, Any], folder: Path) -> list[Plot]:
    t, length = np.array(found["times"]), np.array(found["distances"])
    size = float(np.linalg.norm(found["vector"]))
    fit = fit_diffusion(t.tolist(), length.tolist())
    low, high = fit.slope_interval
    figure, axes = new_axes("time", "length of w")
    axes.plot(t, length, "o", ms=2.5, color=OTHERS[0])
    axes.plot(t, fit.intercept + fit.slope * np.log(t), color=OTHERS[0], lw=1)
    walked = finish(
        figure,
        folder,
        "separable-distance",
        "Logistic regression on separable data walks as log t",
        f"Length of w(t) against time; d = a + b ln t has b = {fit.slope:.4f} in [{low:.4f}, "
        f"{high:.4f}] (95 %); the hard-margin vector has length {size:.4f}.",
    )
    gaps = np.array(found["gaps"])
    late = (t > 1e3) & (gaps > 0)
    power, level = np.polyfit(np.log(np.log(t[late])), np.log(gaps[late]), 1)
    end = late & (np.log(t) > np.log(t[-1]) / 2)
    later = np.polyfit(np.log(np.log(t[end])), np.log(gaps[end]), 1)[0]
    figure, axes = new_axes("ln t", "gap of the margin to its maximum")
    axes.plot(np.log(t[late]), gaps[late], "o", ms=2.5, color=OTHERS[1])
    axes.plot(np.log(t[late]), np.exp(level) * np.log(t[late]) ** power, color=OTHERS[1], lw=1)
    axes.set_yscale("log")
    gap = finish(
        figure,
        folder,
        "separable-gap",
        "The margin's gap shrinks as 1 / log t",
        f"Gap of the margin against ln t, from t = 1000 on: it falls as (ln t)^{power:.2f}, and as "
        f"(ln t)^{later:.2f} in the later half (least squares on log axes; theory has -1 in the "
        "end). The descent has no noise, so there is no interval.",
    )
    return [walked, gap]


def _potential(found: dict[str, Any], folder: Path) -> list[Plot]:
    measured = (found["distances"], found["losses"], found["origin"], found["radius"])
    scan = RandomPotential.from_losses(*measured, BINS)
    figure, axes = new_axes("distance from the initial weights", "deviation of the loss (rms)")
    for (count, bins), colour in zip(scan.binned.items(), OTHERS, strict=False):
        axes.plot(bins.distances, bins.rms, "o", ms=3, color=colour, label=f"{count} bins")
    axes.set_yscale("log")
    axes.legend(loc="upper left")
    radii = sorted({scan.radius, scan.radius / 4, min(10.0, scan.radius)}, reverse=True)
    alphas = (
        f"{part.alpha:.2f} ± {part.alpha_stderr:.2f} up to {part.radius:.3g}"
        for part in map(scan.within, radii)
    )
    left = scan.detrended
    caption = (
        f"The loss of F1 over {found['images']:,} training digits at {len(scan.losses):,} random "
        "places around its initial weights, as root-mean-square deviation per bin of distance; "
        f"the runs of this study walked up to {found['walked']:.3g}. Exponent alpha by likelihood, "
        f"with its standard error: {', '.join(alphas)}; with the mean trend removed "
        f"{left.alpha:.2f} ± {left.alpha_stderr:.2f}. The paper finds 2; any smooth loss with a "
        "gradient has 2 near the origin."
    )
    return [finish(figure, folder, "potential", "The random potential", caption)]


DRAW: dict[str, Callable[[dict[str, Any], Path], list[Plot]]] = {
    "walk": _walk,
    "separable": _separable,
    "potential": _potential,
}
