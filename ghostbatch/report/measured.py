"""Figures of what runs measured on request: the gradient noise scale and the sharpness."""

from collections.abc import Callable
from math import isfinite
from typing import Any

import altair as alt

from ghostbatch.optim import SGD
from ghostbatch.report.charts import Plot, axis, data_of, layered, markers, tips
from ghostbatch.report.drawing import Data
from ghostbatch.report.runs import Group
from ghostbatch.train import Record


def noise_scale(groups: list[Group], _curves: Data) -> Plot | None:
    """Plot the gradient noise scale of each run against updates, with its interval."""

    def measure(record: Record) -> tuple[float | None, ...]:
        return record.noise_scale, record.noise_scale_low, record.noise_scale_high

    rows = _rows(groups, measure)
    if not rows:
        return None
    data = data_of((*PLACE, "noise", "low", "high"), rows)

    def layers(base: alt.Chart) -> list[alt.Chart]:
        ends = base.encode(y="low:Q", y2="high:Q").transform_filter("datum.low > 0")
        return [ends.mark_rule(opacity=0.35), *_lines(base, data)]

    title = "gradient noise scale, samples"
    chart = _chart(data, axis("noise", title, log=True), layers)
    caption = (
        "Gradient noise scale against updates: well below it a larger batch still pays. Each seed "
        "is a line; vertical lines are 95 % intervals, where these have two ends. Where the "
        "gradient cannot be told from 0 there is no point."
    )
    return Plot("noise-scale", "Gradient noise scale", caption, chart, data)


def sharpness(groups: list[Group], _curves: Data) -> Plot | None:
    """Plot rate times sharpness of each run against updates, and where SGD becomes unstable."""
    rows = _rows(groups, lambda record: (record.sharpness,))
    if not rows:
        return None
    edges = {group.column: _edge(group) for group in groups}
    rows = [(*row[:-1], row[-1] * row[3], row[-1], edges[row[0]]) for row in rows]
    data = data_of((*PLACE, "product", "sharpness", "edge"), rows)

    def layers(base: alt.Chart) -> list[alt.Chart]:
        edge = base.mark_line(strokeDash=[5, 4]).encode(y="edge:Q")
        return [edge.transform_filter("datum.edge != null"), *_lines(base, data)]

    chart = _chart(data, axis("product", "rate × sharpness", log=True), layers)
    caption = (
        "Learning rate times sharpness, the largest eigenvalue of the Hessian of the training loss "
        "over a thousand images, against updates. Each seed is a line. The dashed line is "
        "2 (1 + momentum), above which gradient descent on a quadratic loss is unstable."
    )
    return Plot("sharpness", "Edge of stability", caption, chart, data)


PLACE = ("column", "run", "update", "lr")


def _rows(
    groups: list[Group], measure: Callable[[Record], tuple[float | None, ...]]
) -> list[tuple[Any, ...]]:
    """Return a row for each evaluation after an update whose first value was measured."""
    rows = []
    for group in groups:
        for run in group.runs:
            for record in run.records.shown:
                values = [None if v is None or not isfinite(v) else v for v in measure(record)]
                if record.update > 0 and values[0] is not None and values[0] > 0:
                    place = (group.column, f"seed {run.seed}", record.update, record.lr)
                    rows.append((*place, *values))
    return rows


def _edge(group: Group) -> float | None:
    recipe = group.runs[0].plan.recipe
    return 2 * (1 + recipe.regime.momentum) if isinstance(recipe.optimizer, SGD) else None


def _lines(base: alt.Chart, data: Data) -> list[alt.Chart]:
    lines: alt.Chart = base.mark_line(strokeWidth=1.5).encode(detail="run:N")
    return [lines, markers(base, "column", _names(data), 30)]


def _chart(
    data: Data, y: dict[str, Any], layers: Callable[[alt.Chart], list[alt.Chart]]
) -> dict[str, Any]:
    tooltip = [*tips("column", "run", "update"), ("lr", "rate", ".4~g")]
    tooltip += [(name, name, ".4~g") for name in data if name not in PLACE]
    return layered("column", _names(data), axis("update", "update", log=True), y, tooltip, layers)


def _names(data: Data) -> list[str]:
    return list(dict.fromkeys(data["column"]))
