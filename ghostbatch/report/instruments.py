"""Figures of a study's instruments, from the JSON files in its folder."""

import json
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import altair as alt
import numpy as np

from ghostbatch.diagnostics import RandomPotential, fit_diffusion
from ghostbatch.errors import InputError
from ghostbatch.report.charts import (
    OTHERS,
    Plot,
    axis,
    dashed,
    data_of,
    declared,
    file_name,
    layered,
    markers,
    ticks,
    tips,
)
from ghostbatch.report.drawing import NAME, Data
from ghostbatch.report.runs import Results
from ghostbatch.report.table import Table, show_spread
from ghostbatch.study import Row, Study

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
            except (ValueError, LookupError, TypeError, AttributeError):
                problem = f"{source} cannot be read"
                errors.append(InputError("folder", problem, "delete it, and run the study again"))
    if errors and not (plots or results.rows):
        raise errors[0]
    for error in errors:
        warnings.warn(f"{error.problem}; {error.remedy}", stacklevel=2)
    return plots


def _walk(found: dict[str, Any], _: Study) -> list[Plot]:
    rows: list[tuple[object, ...]] = []
    lines = []
    for kind, walk in found.items():
        t, d, error = (np.array(walk[name]) for name in ("times", "distances", "stderrs"))
        late = t >= 10  # the first steps on a grid are not yet a diffusion
        fit = fit_diffusion(t[late].tolist(), d[late].tolist())
        basis = np.log(t) ** fit.exponent if fit.better == "log" else np.sqrt(t)
        b, a = np.polyfit(basis[late], d[late], 1)
        fitted = np.where(late, a + b * basis, None)
        for step, *values in zip(t, d, d - error, d + error, fitted, strict=True):
            rows.append((kind, int(step), *values))
        low, high = fit.exponent_interval
        lines.append((kind, f"{fit.exponent:.2f}", f"[{low:.2f}, {high:.2f}]", fit.finding))
    data = data_of(("line", "step", "distance", "low", "high", "fit"), rows)

    def layers(base: alt.Chart) -> list[alt.Chart]:
        bars = base.encode(y="low:Q", y2="high:Q").mark_rule()
        return [
            bars.transform_filter("datum.low > 0"),
            markers(base, "line", list(found), 25).transform_filter("datum.distance > 0"),
            dashed(base).encode(y="fit:Q", detail="line:N").transform_filter("datum.fit > 0"),
        ]

    chart = layered(
        "line",
        list(found),
        axis("step", "step", log=True),
        axis("distance", "distance (root-mean-square)", log=True),
        tips("line", "step", "distance", "fit"),
        layers,
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
    draws = found["draws"]
    names = [f"draw {index}" for index in range(len(draws))]
    rows: list[tuple[object, ...]] = []
    lines, ends = [], []
    for name, draw in zip(names, draws, strict=True):
        t, gaps = np.array(draw["times"]), np.array(draw["gaps"])
        lengths = np.array(draw["distances"]) / draw["length"]
        products = gaps * np.log(t)
        for values in zip(t, np.log(t), lengths, products, strict=True):
            rows.append((name, *values))
        ratios = (f"{each:.4f}" for each in (draw["limit"], products[-1], gaps[-1] * lengths[-1]))
        lines.append((name, *ratios, f"{t[-1] ** -draw['slack']:.0e}"))
        ends.append(products[-1])
    data = data_of(("draw", "time", "log_time", "length", "product"), rows)

    def chart(field: str, x: dict[str, Any], y: dict[str, Any]) -> dict[str, Any]:
        tooltip = [("draw", "draw", ""), ("log_time", "ln t", ".4~g"), (field, field, ".5~g")]
        return layered("draw", names, x, y, tooltip, lambda base: [base.mark_line(strokeWidth=1.8)])

    length = Plot(
        "separable-distance",
        "Logistic regression on separable data moves as log t",
        f"Length of the weight vector w(t) of logistic regression on {len(draws)} draws of "
        "separable data, over the length of the hard-margin vector. Theory lets every draw "
        "grow as ln t plus a constant.",
        chart(
            "length",
            axis("time", "time", log=True),
            axis("length", "length of w over the hard margin's", low=0),
        ),
        data,
    )
    gap = Plot(
        "separable-gap",
        "The gap of the margin shrinks as 1 / log t",
        "Gap between the margin of w(t) and the largest possible one, times ln t, for "
        f"{len(draws)} draws of the data; larger values are drawn at the top. The table has "
        "for each draw the limit in closed form, (H(p) - ln(1 / p_max)) / |w_hat| with p the "
        "normalised dual weights of the support vectors; gap x ln t and gap x |w| / |w_hat| at "
        "the end, which have this limit; and t^-s, the weight left of the sample nearest to "
        "being a support vector.",
        chart(
            "product",
            axis("log_time", "ln t", low=0),
            axis("product", "gap of the margin times ln t", low=0, high=2 * max(ends)),
        ),
        data,
        Table(("", "limit", "gap x ln t", "gap x |w| / |w_hat|", "t^-s"), lines),
    )
    return [length, gap]


def _potential(found: dict[str, Any], _: Study) -> list[Plot]:
    measured = (found["distances"], found["losses"], found["origin"], found["radius"])
    scan = RandomPotential.from_losses(*measured, BINS)
    rows = [
        (f"{count} bins", float(distance), float(rms))
        for count, bins in scan.binned.items()
        for distance, rms in zip(bins.distances, bins.rms, strict=True)
    ]
    data = data_of(("bins", "distance", "rms"), rows)
    base = alt.Chart().encode(
        x=alt.X(**_log_axis(data, "distance", "distance")),
        y=alt.Y(**_log_axis(data, "rms", "deviation of the loss (rms)")),
        tooltip=[
            alt.Tooltip("distance:Q", format=".4~g"),
            alt.Tooltip("rms:Q", title="deviation", format=".4~g"),
        ],
    )
    points = base.mark_point(size=45, filled=False, stroke=OTHERS[0], strokeWidth=1.8)
    chart = alt.layer(points).properties(width=190, height=220)
    panels = chart.facet(
        alt.Facet("bins:N", sort=[f"{count} bins" for count in BINS], title=None),
        columns=3,
        data=alt.NamedData(name=NAME),
    )
    drawn = " (Glorot's)" if found["init"] == "glorot" else ""
    caption = (
        f"Root-mean-square deviation of the loss of {found['model']} from its value at the initial "
        f"weights{drawn}, by distance from them, at {len(scan.losses):,} random places, for "
        f"several numbers of bins. The loss is over {found['images']:,} training images of "
        f"{found['data']}. Runs of this study ended at distances up to {found['walked']:.3g}. The "
        "exponent alpha is the maximum of the likelihood, with its standard error, of all changes "
        "of the loss and with their mean trend removed. The paper finds 2, but any smooth loss "
        "with a gradient has 2 near the origin."
    )
    lines = []
    for part in by_radius(scan):
        alphas = (f"{each.alpha:.2f} ± {each.alpha_stderr:.2f}" for each in (part, part.detrended))
        lines.append((f"{part.radius:.3g}", *alphas))
    table = Table(("up to distance", "alpha", "alpha, trend removed"), lines)
    return [Plot("potential", "The random potential", caption, declared(panels), data, table)]


def _log_axis(data: Data, field: str, title: str) -> dict[str, Any]:
    """Return a logarithmic axis with labels over the range of a field."""
    drawn = [value for value in data[field] if value > 0] or [1.0]
    return axis(field, title, log=True, values=ticks(min(drawn), max(drawn)))


def by_radius(scan: RandomPotential) -> list[RandomPotential]:
    """Return the parts of a scan up to each of `RADII` that holds 30 samples, and the whole."""
    near = (r for r in RADII if r < scan.radius and sum(z <= r for z in scan.distances) >= 30)
    return [*map(scan.within, near), scan]


def _sharpness(found: dict[str, Any], study: Study) -> list[Plot]:
    """Return for each row a figure of both measures and a table by column, in the study's order."""
    rows: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for place, run in found["runs"].items():
        row, column, _ = place.rsplit("/", 2)
        rows.setdefault(row, {}).setdefault(column, []).append(run)
    plots = []
    for row, columns in rows.items():
        order = dict.fromkeys([*study.rows.get(row, Row({})).columns, *columns])
        plots.append(_sharpness_of_row(row, {c: columns[c] for c in order if c in columns}))
    return plots


def _sharpness_of_row(row: str, columns: dict[str, list[dict[str, Any]]]) -> Plot:
    rows = []
    lines = []
    for column, runs in columns.items():
        values = [(run["eigenvalue"]["value"], run["relative"]["value"]) for run in runs]
        rows += [(column, float(eigenvalue), float(relative)) for eigenvalue, relative in values]
        stable = [run["rate"] * run["eigenvalue"]["value"] for run in runs]
        spreads = (
            show_spread(each, _digits(each)) for each in (*zip(*values, strict=True), stable)
        )
        lines.append((column, *spreads, str(len(runs))))
    data = data_of(("column", "eigenvalue", "relative"), rows)
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
    plain, own = "largest eigenvalue", "relative eigenvalue"
    positive = "datum.eigenvalue > 0 && datum.relative > 0"
    chart = layered(
        "column",
        names,
        axis("eigenvalue", plain, log=True),
        axis("relative", own, log=True),
        [("column", "column", ""), ("eigenvalue", plain, ".4~g"), ("relative", own, ".4~g")],
        lambda base: [markers(base, "column", names).transform_filter(positive)],
        mouse=positive,
    )
    table = Table(("", plain, own, "rate x eigenvalue", "seeds"), lines)
    name = file_name(f"sharpness-{row}")
    return Plot(name, "Sharpness at the end", caption, chart, data, table, subtitle=row)


def _digits(values: Sequence[float]) -> int:
    """Return how many decimals show three digits of the mean: columns may differ by factors."""
    size = abs(float(np.mean(values)))
    return max(0, 2 - int(np.floor(np.log10(size)))) if size > 0 else 0


KINDS: dict[str, Callable[[dict[str, Any], Study], list[Plot]]] = {
    "walk": _walk,
    "separable": _separable,
    "potential": _potential,
    "sharpness": _sharpness,
}
"""For each instrument, a function from the content of its file, and the study, to its figures."""
