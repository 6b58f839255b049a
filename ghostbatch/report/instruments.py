"""Figures of a study's instruments, from the JSON files in its folder."""

import json
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import altair as alt
import numpy as np

from ghostbatch.diagnostics import RandomPotential, fit_diffusion
from ghostbatch.errors import InputError
from ghostbatch.report.charts import OTHERS, Plot, axis, declared, layered, markers, rounded, ticks
from ghostbatch.report.drawing import NAME, Data
from ghostbatch.report.runs import Results
from ghostbatch.report.table import Table, show_spread
from ghostbatch.study import Study

BINS = (10, 20, 50)

RADII = (3.0, 10.0, 20.0)
"""Radii of the random potential besides its largest: alpha depends on them."""


def instrument_figures(results: Results, folder: Path) -> list[Plot]:
    """Return the figures of the study's instruments whose files are in ``folder``.

    A file that cannot be read is warned of and left out; it is refused if there is nothing else.
    """
    plots: list[Plot] = []
    errors = []
    for instrument in results.study.instruments:
        source = folder / f"{instrument.name}.json"
        if source.exists():
            try:
                found = json.loads(source.read_text())
                plots += KINDS[instrument.name](found, results.study)
            except (ValueError, KeyError, TypeError, AttributeError):
                problem = f"{source} cannot be read"
                errors.append(InputError("folder", problem, "delete it, and run the study again"))
    if errors and not (plots or results.rows):
        raise errors[0]
    for error in errors:
        warnings.warn(f"{error.problem}; {error.remedy}", stacklevel=2)
    return plots


def _walk(found: dict[str, Any], _: Study) -> list[Plot]:
    data: Data = {name: [] for name in ("line", "step", "distance", "low", "high", "fit")}
    lines = []
    for kind, walk in found.items():
        t, d, error = (np.array(walk[name]) for name in ("times", "distances", "stderrs"))
        late = t >= 10  # the first steps on a grid are not yet a diffusion
        fit = fit_diffusion(t[late].tolist(), d[late].tolist())
        basis = np.log(t) ** fit.exponent if fit.better == "log" else np.sqrt(t)
        b, a = np.polyfit(basis[late], d[late], 1)
        data["line"] += [kind] * len(t)
        data["step"] += t.tolist()
        for name, values in (("distance", d), ("low", d - error), ("high", d + error)):
            data[name] += rounded(values)
        drawn = zip(a + b * basis, late, strict=True)
        data["fit"] += [rounded([value])[0] if is_late else None for value, is_late in drawn]
        low, high = fit.exponent_interval
        lines.append((kind, f"{fit.exponent:.2f}", f"[{low:.2f}, {high:.2f}]", fit.finding))
    y = axis("distance", "distance (root-mean-square)", log=True)

    def layers(base: alt.Chart) -> list[alt.Chart]:
        ends = base.encode(y=alt.Y(**{**y, "shorthand": "low:Q"}), y2="high:Q")
        fitted = base.encode(y=alt.Y(**{**y, "shorthand": "fit:Q"}))
        dashed = fitted.mark_line(strokeDash=[5, 4], strokeWidth=1.4, stroke="currentColor")
        return [
            ends.mark_rule().transform_filter("datum.low > 0"),
            markers(base, "line", list(found), 25).transform_filter("datum.distance > 0"),
            dashed.encode(detail="line:N").transform_filter("datum.fit > 0"),
        ]

    tooltip = [("line", "line", ""), ("step", "step", ",d"), ("distance", "distance", ".4~g")]
    tooltip.append(("fit", "fit", ".4~g"))
    chart = layered(
        *("line", list(found), axis("step", "step", log=True), y, tooltip, layers),
        mouse="datum.distance > 0",
    )
    caption = (
        "Distance of a thousand walkers on a Brownian potential, where theory predicts (ln t)^2, "
        "and of a thousand on a flat line, where it predicts sqrt t. Bars are standard errors. "
        "Dashed lines are fits from step 10 on: d = a + b (ln t)^p, or d = a + b sqrt t if AIC "
        "prefers sqrt t to ln t."
    )
    table = Table(("", "exponent p", "95 % interval", "law"), lines)
    return [Plot("walk", "Walkers on a rough and on a flat line", caption, chart, data, table)]


def _separable(found: dict[str, Any], _: Study) -> list[Plot]:
    draws = found.get("draws") or [{**found, "length": float(np.linalg.norm(found["vector"]))}]
    names = [f"draw {index}" for index in range(len(draws))]
    data: Data = {name: [] for name in ("draw", "time", "log_time", "length", "product")}
    lines, ends = [], []
    for name, draw in zip(names, draws, strict=True):
        t, gaps = np.array(draw["times"]), np.array(draw["gaps"])
        lengths = np.array(draw["distances"]) / draw["length"]
        data["draw"] += [name] * len(t)
        data["time"] += rounded(t)
        data["log_time"] += rounded(np.log(t))
        data["length"] += rounded(lengths)
        data["product"] += rounded(gaps * np.log(t))
        limit = f"{draw['limit']:.4f}" if "limit" in draw else "–"
        left = f"{t[-1] ** -draw['slack']:.0e}" if "slack" in draw else "–"
        products = (gaps[-1] * np.log(t[-1]), gaps[-1] * lengths[-1])
        lines.append((name, limit, *(f"{product:.4f}" for product in products), left))
        ends.append(products[0])
    plots = []
    for field, x, y, title, caption in (
        (
            "length",
            axis("time", "time", log=True),
            axis("length", "length of w over the hard margin's", low=0),
            "Logistic regression on separable data moves as log t",
            f"Length of the weight vector w(t) of logistic regression on {len(draws)} draws of "
            "separable data, over the length of the hard-margin vector. Theory lets every draw "
            "grow as ln t plus a constant.",
        ),
        (
            "product",
            axis("log_time", "ln t", low=0),
            axis("product", "gap of the margin times ln t", low=0, high=2 * max(ends)),
            "The gap of the margin shrinks as 1 / log t",
            "Gap between the margin of w(t) and the largest possible one, times ln t, for "
            f"{len(draws)} draws of the data; larger values are drawn at the top. The table has "
            "for each draw the limit in closed form, (H(p) - ln(1 / p_max)) / |w_hat| with p the "
            "normalised dual weights of the support vectors; gap x ln t and gap x |w| / |w_hat| at "
            "the end, which have this limit; and t^-s, the weight left of the sample nearest to "
            "being a support vector.",
        ),
    ):
        tooltip = [("draw", "draw", ""), ("log_time", "ln t", ".4~g"), (field, field, ".5~g")]

        def layers(base: alt.Chart) -> list[alt.Chart]:
            return [base.mark_line(strokeWidth=1.8)]

        chart = layered("draw", names, x, y, tooltip, layers)
        headers = ("", "limit", "gap x ln t", "gap x |w| / |w_hat|", "t^-s")
        table = Table(headers, lines) if field == "product" else None
        name = {"length": "separable-distance", "product": "separable-gap"}[field]
        plots.append(Plot(name, title, caption, chart, data, table))
    return plots


def _potential(found: dict[str, Any], _: Study) -> list[Plot]:
    measured = (found["distances"], found["losses"], found["origin"], found["radius"])
    scan = RandomPotential.from_losses(*measured, BINS)
    data: Data = {name: [] for name in ("bins", "distance", "rms")}
    for count, bins in scan.binned.items():
        data["bins"] += [f"{count} bins"] * len(bins.distances)
        data["distance"] += rounded(bins.distances)
        data["rms"] += rounded(bins.rms)
    names = [f"{count} bins" for count in BINS]
    x, y = (
        axis(field, title, log=True, values=ticks(min(drawn), max(drawn)))
        for field, title in (("distance", "distance"), ("rms", "deviation of the loss (rms)"))
        for drawn in [[value for value in data[field] if value > 0] or [1.0]]
    )
    base = alt.Chart().encode(
        x=alt.X(**x),
        y=alt.Y(**y),
        tooltip=[
            alt.Tooltip("distance:Q", format=".4~g"),
            alt.Tooltip("rms:Q", title="deviation", format=".4~g"),
        ],
    )
    points = base.mark_point(size=45, filled=False, stroke=OTHERS[0], strokeWidth=1.8)
    chart = alt.layer(points).properties(width=190, height=220)
    panels = chart.facet(
        alt.Facet("bins:N", sort=names, title=None), columns=3, data=alt.NamedData(name=NAME)
    )
    drawn = " (Glorot's)" if found.get("init") == "glorot" else ""
    caption = (
        f"Root-mean-square deviation of the loss of {found['model']} from its value at the initial "
        f"weights{drawn}, by distance from them, at {len(scan.losses):,} random places, for "
        f"several numbers of bins. The loss is over {found['images']:,} training images of "
        f"{found['data']}. Runs of this study ended at distances up to {found['walked']:.3g}. The "
        "exponent alpha is the maximum of the likelihood, with its standard error, of all changes "
        "of the loss and with their mean trend removed. The paper finds 2, but any smooth loss "
        "with a gradient has 2 near the origin."
    )
    lines = [
        (
            f"{part.radius:.3g}",
            f"{part.alpha:.2f} ± {part.alpha_stderr:.2f}",
            f"{part.detrended.alpha:.2f} ± {part.detrended.alpha_stderr:.2f}",
        )
        for part in by_radius(scan)
    ]
    table = Table(("up to distance", "alpha", "alpha, trend removed"), lines)
    return [Plot("potential", "The random potential", caption, declared(panels), data, table)]


def by_radius(scan: RandomPotential) -> list[RandomPotential]:
    """Return the parts of a scan up to each of `RADII` that holds 30 samples, and the whole."""
    near = (r for r in RADII if r < scan.radius and sum(z <= r for z in scan.distances) >= 30)
    return [*map(scan.within, near), scan]


def _sharpness(found: dict[str, Any], study: Study) -> list[Plot]:
    """Return for each row a figure of both measures and a table by column."""
    rows: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for place, run in found["runs"].items():
        row, column, _ = place.rsplit("/", 2)
        rows.setdefault(row, {}).setdefault(column, []).append(run)
    return [
        _sharpness_of_row(row, {name: runs[name] for name in _in_order(row, runs, study)})
        for row, runs in rows.items()
    ]


def _in_order(row: str, found: dict[str, Any], study: Study) -> list[str]:
    """Return the columns of a row that were found, in the study's order."""
    declared = study.rows[row].columns if row in study.rows else {}
    return [*(name for name in declared if name in found), *(n for n in found if n not in declared)]


def _sharpness_of_row(row: str, columns: dict[str, list[dict[str, Any]]]) -> Plot:
    data: Data = {name: [] for name in ("column", "eigenvalue", "relative")}
    lines = []
    for column, runs in columns.items():
        plain, relative = ([run[m]["value"] for run in runs] for m in ("eigenvalue", "relative"))
        stable = [run["rate"] * run["eigenvalue"]["value"] for run in runs]
        data["column"] += [column] * len(runs)
        data["eigenvalue"] += rounded(plain)
        data["relative"] += rounded(relative)
        spreads = (show_spread(values, _digits(values)) for values in (plain, relative, stable))
        lines.append((column, *spreads, str(len(runs))))
    names = list(columns)
    images = max(run["images"] for runs in columns.values() for run in runs)
    caption = (
        "Largest eigenvalue of the Hessian of the training loss at the end of each run, and of the "
        "Hessian with rows and columns multiplied by the magnitudes of the weights, which does not "
        f"change if layers are rescaled. The loss is over {images:,} training images in one batch, "
        "whose statistics the norm layers use. The table has means and standard deviations over "
        "seeds, and the eigenvalue times the learning rate before the first drop: gradient descent "
        "with momentum m on a loss of this curvature is unstable above 2 (1 + m)."
    )
    x, y = (axis(f, title, log=True) for f, title in (("eigenvalue", _PLAIN), ("relative", _OWN)))

    def layers(base: alt.Chart) -> list[alt.Chart]:
        return [markers(base, "column", names).transform_filter(_POSITIVE)]

    tooltip = [("column", "column", ""), ("eigenvalue", _PLAIN, ".4~g"), ("relative", _OWN, ".4~g")]
    chart = layered("column", names, x, y, tooltip, layers, mouse=_POSITIVE)
    table = Table(("", _PLAIN, _OWN, "rate x eigenvalue", "seeds"), lines)
    name = re.sub(r"[^\w.+-]+", "-", f"sharpness-{row}")
    return Plot(name, "Sharpness at the end", caption, chart, data, table, subtitle=row)


def _digits(values: list[float]) -> int:
    """Return how many decimals show three digits of the mean: columns may differ by factors."""
    size = abs(float(np.mean(values)))
    return max(0, 2 - int(np.floor(np.log10(size)))) if size > 0 else 0


_PLAIN, _OWN = "largest eigenvalue", "relative eigenvalue"
_POSITIVE = "datum.eigenvalue > 0 && datum.relative > 0"


KINDS: dict[str, Callable[[dict[str, Any], Study], list[Plot]]] = {
    "walk": _walk,
    "separable": _separable,
    "potential": _potential,
    "sharpness": _sharpness,
}
"""For each instrument, a function from the content of its file, and the study, to its figures."""
