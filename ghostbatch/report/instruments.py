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
from ghostbatch.report.figures import OTHERS, STYLE, Plot, new_axes
from ghostbatch.report.runs import Results

BINS = (10, 20, 50)

RADII = (3.0, 10.0, 20.0)
"""Radii of the random potential besides its largest: alpha depends on them."""


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
        verdicts.append(f"{kind}: p = {fit.exponent:.2f} in [{low:.2f}, {high:.2f}], {fit.finding}")
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
    distance, lengths = new_axes("ln t", "|w| / |w_hat|")
    gap, products = new_axes("ln t", "gap of the margin times ln t")
    lengths.set_xscale("linear")
    products.set_xscale("linear")
    draws, colours = found["draws"], OTHERS * len(found["draws"])
    for draw, colour in zip(draws, colours, strict=False):
        log_t = np.log(draw["times"])
        lengths.plot(log_t, np.array(draw["distances"]) / draw["length"], color=colour, lw=1)
        products.plot(log_t, np.array(draw["gaps"]) * log_t, color=colour, lw=1)
        products.plot(log_t[-1], draw["limit"], "o", ms=3, color=colour)
    lengths.plot(log_t, log_t, "--", color="#888888", lw=1)
    rows = (
        f"{limit:.4f}, {product:.4f} and {scaled:.4f} ({left:.0e})"
        for limit, product, scaled, left in gap_limits(draws)
    )
    return {
        "separable-distance": Plot(
            distance,
            "Logistic regression on separable data moves as log t",
            f"Length of the weight vector w(t) of logistic regression on {len(draws)} draws of "
            "separable data, over the length of the hard-margin vector w_hat. The dashed line is "
            "ln t; in theory every draw becomes parallel to it.",
        ),
        "separable-gap": Plot(
            gap,
            "The gap of the margin shrinks as 1 / log t",
            "Gap between the margin of w(t) and the largest possible one, times ln t, for "
            f"{len(draws)} draws of the data. Points are the limits, in closed form: "
            "(H(p) - ln(1 / p_max)) / |w_hat|, with p the normalised dual weights of the support "
            "vectors. For each draw: the limit, gap x ln t at the end, and gap x |w| / |w_hat|, "
            "which has the same limit and reaches it sooner; in brackets t^-s, the weight left of "
            f"the sample that is nearest to being a support vector. {'; '.join(rows)}.",
        ),
    }


def gap_limits(draws: list[dict[str, Any]]) -> list[tuple[float, float, float, float]]:
    """Return for each draw the limit, gap x ln t and gap x |w| / |w_hat| at the end, and t^-s."""
    rows = []
    for draw in draws:
        t, gap = draw["times"][-1], draw["gaps"][-1]
        scaled = gap * draw["distances"][-1] / draw["length"]
        rows.append((draw["limit"], gap * np.log(t), scaled, t ** -draw["slack"]))
    return rows


def _potential(found: dict[str, Any]) -> dict[str, Plot]:
    measured = (found["distances"], found["losses"], found["origin"], found["radius"])
    scan = RandomPotential.from_losses(*measured, BINS)
    figure, axes = new_axes("distance from the initial weights", "deviation of the loss (rms)")
    for (count, bins), colour in zip(scan.binned.items(), OTHERS, strict=False):
        axes.plot(bins.distances, bins.rms, "o", ms=3, color=colour, label=f"{count} bins")
    axes.set_yscale("log")
    axes.legend(loc="upper left")
    rows = (
        f"{part.alpha:.2f} ± {part.alpha_stderr:.2f} and {part.detrended.alpha:.2f} ± "
        f"{part.detrended.alpha_stderr:.2f} up to {part.radius:.3g}"
        for part in by_radius(scan)
    )
    drawn = " (Glorot's)" if found.get("init") == "glorot" else ""
    caption = (
        f"Root-mean-square deviation of the loss of {found['model']} from its value at the initial "
        f"weights{drawn}, by distance, at {len(scan.losses):,} random places. The loss is over "
        f"{found['images']:,} training images of {found['data']}. Runs of this study ended at "
        f"distances up to {found['walked']:.3g}. The exponent alpha is the maximum of the "
        "likelihood, with its standard error, of all changes of the loss and with their mean trend "
        f"removed: {', '.join(rows)}. The paper finds 2, but any smooth loss with a gradient has 2 "
        "near the origin."
    )
    return {"potential": Plot(figure, "The random potential", caption)}


def by_radius(scan: RandomPotential) -> list[RandomPotential]:
    """Return the parts of a scan up to each of `RADII` that holds 30 samples, and the whole."""
    near = (r for r in RADII if r < scan.radius and sum(z <= r for z in scan.distances) >= 30)
    return [*map(scan.within, near), scan]


KINDS: dict[str, Callable[[dict[str, Any]], dict[str, Plot]]] = {
    "walk": _walk,
    "separable": _separable,
    "potential": _potential,
}
"""For each instrument, a function from its file to its figures by name."""
