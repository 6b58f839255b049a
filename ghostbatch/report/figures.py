"""The figures of a study's runs: error, and weight distance, against updates and epochs."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import altair as alt
import numpy as np

from ghostbatch.errors import check_choice
from ghostbatch.report.charts import (
    Plot,
    axis,
    dashed,
    file_name,
    layered,
    markers,
    rounded,
    ticks,
    tips,
)
from ghostbatch.report.curves import add_lines, curves_of
from ghostbatch.report.drawing import Data
from ghostbatch.report.growth import Growth, fit_growth
from ghostbatch.report.longer import accuracy_by_distance, gain_at_drop
from ghostbatch.report.measured import noise_scale, sharpness
from ghostbatch.report.runs import Group, Results
from ghostbatch.report.table import Table
from ghostbatch.report.targets import time_to_accuracy
from ghostbatch.study import Row

FLOOR = 0.5
"""Lower end of a logarithmic error axis, in percent; smaller errors would squash the others."""

WHEN = ("column", "run", "split", "update", "epoch")
VALIDATED = "datum.split == 'validation'"
FITTED = "datum.split == 'fit'"
TRAINED = "datum.split == 'train'"
LATE = 200 / 3
ZOOMED = f"datum.split == 'validation' && datum.share >= {LATE}"


def row_figures(results: Results) -> list[Plot]:
    """Return the figures that each row declares, and those of what its runs measured on request."""
    plots = []
    scale = f"all epochs × {results.study.scale:g}" if results.study.scale != 1 else ""
    for row, groups in results.rows.items():
        data = curves_of(groups)
        for kind in (*results.study.rows.get(row, Row({})).figures, *ON_REQUEST):
            check_choice(f"figures of row {row}", kind, KINDS)
            if (plot := KINDS[kind](groups, data)) is not None:
                several = len(results.rows) > 1
                name = file_name(f"{row}-{kind}") if several else kind
                subtitle = ", ".join(filter(None, (row if several else "", scale)))
                plots.append(replace(plot, name=name, subtitle=subtitle))
    return plots


def _errors(groups: list[Group], data: Data, unit: str) -> Plot:
    lowest = max(FLOOR, min(filter(None, data["error"]), default=FLOOR))
    low = ticks(FLOOR, lowest)[-1]
    caption = (
        f"Error against {unit}s. Solid lines are the validation error: the mean over seeds, with a "
        "band of one standard deviation. Dotted lines are the error on the training batches. "
        f"{_OPEN_RUNS}"
    )
    chart = _error_chart(_names(groups, data), unit, low)
    return Plot(f"error-by-{unit}", f"Error against {unit}s", caption, chart, data)


@cache
def _error_chart(names: tuple[str, ...], unit: str, low: float) -> dict[str, Any]:
    y = axis("error", "error %", log=True, low=low, values=ticks(low, 100))

    def layers(base: alt.Chart) -> list[alt.Chart]:
        lines, points = _lines(base, names)
        band, points = (part.transform_filter(VALIDATED) for part in (_band(base, "error"), points))
        return [band, lines.encode(strokeDash=_DASHES), points]

    tooltip = [*tips(*WHEN, "error"), *_ends("error")]
    return layered("column", names, axis(unit, unit, log=True), y, tooltip, layers)


def _zoomed(groups: list[Group], data: Data) -> Plot:
    caption = (
        "Validation error over the last third of each column's training, on axes that fit it: the "
        f"mean over seeds, with a band of one standard deviation. {_OPEN_RUNS}"
    )
    chart = _zoomed_chart(_names(groups, data))
    return Plot("error-zoomed", "Validation error at the end", caption, chart, data)


@cache
def _zoomed_chart(names: tuple[str, ...]) -> dict[str, Any]:
    x = axis("share", "part of the training done, %", low=LATE, high=100)
    y = axis("error", "validation error %")

    def layers(base: alt.Chart) -> list[alt.Chart]:
        drawn = (_band(base, "error"), *_lines(base, names, mark=2))
        return [part.transform_filter(ZOOMED) for part in drawn]

    tooltip = [*tips(*WHEN, "error"), *_ends("error")]
    return layered("column", names, x, y, tooltip, layers, mouse=ZOOMED)


def _distance(groups: list[Group], data: Data) -> Plot:
    fits = fit_growth([group for group in groups if group.finished])
    caption = (
        "Distance of the weights from their initial values: the mean over seeds, with a band of "
        f"one standard deviation. {_OPEN_RUNS}"
    )
    if fits:
        first, last = fits[0].window
        caption += (
            f"Dashed lines are fits of d = a + b ln t to the log-spaced updates from {first:,} to "
            f"{last:,}, before the first drop of the learning rate in any column. Slopes b, and "
            "exponents p of d = a + b (ln t)^p, are means and standard deviations over seeds; AIC "
            "compares ln t with sqrt t."
        )
    else:
        caption += "There are not enough records before the first drop of the rate for a fit."
    add_lines(data, "fit", {fit.column: _fitted(fit) for fit in fits})
    chart = _distance_chart(_names(groups, data))
    return Plot("distance", "Weight distance", caption, chart, data, _fit_table(fits))


def _fitted(fit: Growth) -> tuple[list[float], list[float]]:
    """Return updates, and the distances of the fit there."""
    t = np.geomspace(*fit.window, 40)
    d = fit.mean.intercept + fit.mean.slope * np.log(t)
    return rounded(t[d >= 0]), rounded(d[d >= 0])


@cache
def _distance_chart(names: tuple[str, ...]) -> dict[str, Any]:
    y = axis("distance", "distance from the initial weights", low=0)

    def layers(base: alt.Chart) -> list[alt.Chart]:
        drawn = [_band(base, "distance"), *_lines(base, names)]
        drawn = [part.transform_filter(TRAINED) for part in drawn]
        return [*drawn, dashed(base).encode(detail="column:N").transform_filter(FITTED)]

    tooltip = [*tips("column", "run", "update", "epoch", "distance"), *_ends("distance")]
    x = axis("update", "update", log=True)
    return layered("column", names, x, y, tooltip, layers, mouse=TRAINED)


def _fit_table(fits: Sequence[Growth]) -> Table | None:
    lines = [(fit.column, fit.slope, fit.exponent, fit.mean.finding) for fit in fits]
    return Table(("", "slope b", "exponent p", "law"), lines) if lines else None


_OPEN_RUNS = "Thin lines are single runs that have not finished or have diverged. "
_DASHES = alt.StrokeDash(
    "split:N",
    scale=alt.Scale(domain=["validation", "train"], range=[[1, 0], [2, 3]]),
    title=None,
)


def _lines(base: alt.Chart, names: Sequence[str], mark: int = 1) -> list[alt.Chart]:
    """Return the curves, and a few markers on each, those of ``mark``; open runs are thin."""
    unfinished = "test(/not finished|diverged/, datum.run)"
    width = alt.condition(unfinished, alt.value(1), alt.value(2))
    lines: alt.Chart = base.mark_line(strokeJoin="round").encode(detail="run:N", strokeWidth=width)
    return [lines, markers(base, "column", names).transform_filter(f"datum.marker & {mark}")]


def _band(base: alt.Chart, value: str) -> alt.Chart:
    """Return the bands of one standard deviation."""
    ends = base.encode(y=f"{value}_low:Q", y2=f"{value}_high:Q", detail="run:N")
    band: alt.Chart = ends.mark_area(opacity=0.2).transform_filter(f"datum.{value}_low != null")
    return band


def _ends(value: str) -> list[tuple[str, str, str]]:
    return [
        (f"{value}_low", "minus one deviation", ".4~g"),
        (f"{value}_high", "plus one deviation", ".4~g"),
    ]


def _names(groups: list[Group], data: Data) -> tuple[str, ...]:
    """Return the columns that have curves."""
    drawn = set(data["column"])
    return tuple(group.column for group in groups if group.column in drawn)


KINDS: dict[str, Callable[[list[Group], Data], Plot | None]] = {
    "error-by-update": partial(_errors, unit="update"),
    "error-by-epoch": partial(_errors, unit="epoch"),
    "error-zoomed": _zoomed,
    "distance": _distance,
    "accuracy-by-distance": accuracy_by_distance,
    "gain-at-drop": gain_at_drop,
    "time-to-accuracy": time_to_accuracy,
    "noise-scale": noise_scale,
    "sharpness": sharpness,
}
"""Figures that a row of a study may have, by the name of their files."""

ON_REQUEST = ("noise-scale", "sharpness")
"""Figures that every row has whose runs measured what they show."""
