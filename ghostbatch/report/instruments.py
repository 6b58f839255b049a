"""Figures of a study's instruments, from the JSON files in its folder."""

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np

from ghostbatch.diagnostics import RandomPotential, fit_diffusion
from ghostbatch.errors import InputError
from ghostbatch.report.figures import OTHERS, STYLE, Plot, new_axes, verdict
from ghostbatch.report.runs import Results

BINS = (10, 20, 50)


@mpl.rc_context(STYLE)
def draw_instruments(results: Results, folder: Path) -> list[Plot]:
    """Draw the figures of the study's instruments whose files are in ``folder``.

    A file that cannot be read is warned of and left out; it is refused if there is nothing else.
    """
    plots: list[Plot] = []
    errors = []
    for instrument in results.study.instruments:
        source = folder / f"{instrument.name}.json"
        if source.exists():
            try:
                figures = KINDS[instrument.name](json.loads(source.read_text()))
            except (ValueError, KeyError, TypeError, AttributeError):
                problem = f"{source} cannot be read"
                errors.append(InputError("folder", problem, "delete it, and run the study again"))
                continue
            for name, plot in figures.items():
                plot.write(folder / "figures", name)
            plots += figures.values()
    if errors and not (plots or results.rows):
        raise errors[0]
    for error in errors:
        warnings.warn(f"{error.problem}; {error.remedy}", stacklevel=2)
    return plots


def _walk(found: dict[str, Any]) -> dict[str, Plot]:
    figure, axes = new_axes("step", "distance (root-mean-square)")
    verdicts = []
    for (kind, walk), colour in zip(found.items(), OTHERS, strict=False):
        t, d = np.array(walk["times"]), np.array(walk["distances"])
        axes.errorbar(t, d, walk["stderrs"], fmt="o", ms=2.5, color=colour, label=kind)
        late = t >= 10  # the first steps on a grid are not yet a diffusion
        fit = fit_diffusion(t[late].tolist(), d[late].tolist())
        low, high = fit.exponent_interval
        basis = np.log(t[late]) ** fit.exponent if fit.better == "log" else np.sqrt(t[late])
        b, a = np.polyfit(basis, d[late], 1)
        axes.plot(t[late], a + b * basis, color=colour, lw=1)
        verdicts.append(
            f"{kind}: p = {fit.exponent:.2f} in [{low:.2f}, {high:.2f}], and {verdict(fit)}"
        )
    axes.set_yscale("log")
    axes.legend(loc="upper left")
    caption = (
        "Distance of a thousand walkers on a Brownian potential, where theory predicts (ln t)^2, "
        "and of a thousand on a flat line, where it predicts sqrt t. Lines are fits from step 10 "
        "on: d = a + b (ln t)^p, or d = a + b sqrt t if AIC prefers sqrt t to ln t. The exponent p "
        f"has a 95 % interval. {'; '.join(verdicts)}."
    )
    return {"walk": Plot(figure, "Walkers on a rough line and on a flat one", caption)}


def _separable(found: dict[str, Any]) -> dict[str, Plot]:
    t, length = np.array(found["times"]), np.array(found["distances"])
    size = float(np.linalg.norm(found["vector"]))
    fit = fit_diffusion(t.tolist(), length.tolist())
    low, high = fit.slope_interval
    distance, axes = new_axes("time", "length of w")
    axes.plot(t, length, "o", ms=2.5, color=OTHERS[0])
    axes.plot(t, fit.intercept + fit.slope * np.log(t), color=OTHERS[0], lw=1)
    gaps = np.array(found["gaps"])
    late = (t > 1e3) & (gaps > 0)
    power, level = np.polyfit(np.log(np.log(t[late])), np.log(gaps[late]), 1)
    end = late & (np.log(t) > np.log(t[-1]) / 2)
    later = np.polyfit(np.log(np.log(t[end])), np.log(gaps[end]), 1)[0]
    gap, axes = new_axes("ln t", "gap of the margin to its maximum")
    axes.plot(np.log(t[late]), gaps[late], "o", ms=2.5, color=OTHERS[1])
    axes.plot(np.log(t[late]), np.exp(level) * np.log(t[late]) ** power, color=OTHERS[1], lw=1)
    axes.set_yscale("log")
    return {
        "separable-distance": Plot(
            distance,
            "Logistic regression on separable data moves as log t",
            "Length of the weight vector w(t) of logistic regression on separable data. The line "
            f"is a fit of d = a + b ln t, with b = {fit.slope:.4f} in [{low:.4f}, {high:.4f}] "
            f"(95 %). The hard-margin vector has length {size:.4f}.",
        ),
        "separable-gap": Plot(
            gap,
            "The gap of the margin shrinks as 1 / log t",
            "Gap between the margin of w(t) and the largest possible one, from t = 1000 on. It "
            f"falls as (ln t)^{power:.2f}, and as (ln t)^{later:.2f} in the later half (least "
            "squares on log axes); theory predicts -1 in the limit. The descent has no noise, so "
            "there is no interval.",
        ),
    }


def _potential(found: dict[str, Any]) -> dict[str, Plot]:
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
    rest = scan.detrended
    caption = (
        f"Root-mean-square deviation of the loss of {found['model']} from its value at the initial "
        f"weights, by distance, at {len(scan.losses):,} random places. The loss is over "
        f"{found['images']:,} training images of {found['data']}. Runs of this study ended at "
        f"distances up to {found['walked']:.3g}. The exponent alpha is the maximum of the "
        f"likelihood, with its standard error: {', '.join(alphas)}; with the mean trend removed "
        f"{rest.alpha:.2f} ± {rest.alpha_stderr:.2f}. The paper finds 2, but any smooth "
        "loss with a gradient has 2 near the origin."
    )
    return {"potential": Plot(figure, "The random potential", caption)}


KINDS: dict[str, Callable[[dict[str, Any]], dict[str, Plot]]] = {
    "walk": _walk,
    "separable": _separable,
    "potential": _potential,
}
"""For each instrument, a function from its file to its figures by name."""
