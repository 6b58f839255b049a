"""How every figure looks and behaves, declared once with altair.

The page draws a declaration with values under the mouse and a legend that hides curves; the SVG
and PNG files are drawn from the same one without the layer for the mouse. Colours of text and axes
are "currentColor": the page's text colour, and black in a file.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import ceil, floor, log10
from typing import Any

import altair as alt

from ghostbatch.report.drawing import HOVER, NAME, Data
from ghostbatch.report.table import Table

COLOURS = {"SB": "#7f8794", "LB": "#d1495b", "+LR": "#dd8a00", "+GBN": "#3b8fd4", "+RA": "#2a9d6f"}
OTHERS = (
    *("#3b8fd4", "#d1495b", "#2a9d6f", "#dd8a00", "#8d6cc4", "#5f9ea0", "#c2577f", "#b0722e"),
    *("#7a8b2e", "#7f8794", "#4f5fc0", "#d98c8c"),
)
SHAPES = ("circle", "square", "triangle-up", "diamond", "cross", "triangle-down")

WHOLE = ("update", "step", "length")
"""Fields whose large values have labels such as 10k."""

TIPS = {
    "error": ("error %", ".2f"),
    "accuracy": ("accuracy %", ".2f"),
    "distance": ("distance", ".4~g"),
    "epoch": ("epoch", ".4~g"),
    "fit": ("fit", ".4~g"),
    **{name: (name, ",d") for name in ("update", "step", "batch")},
    "seconds": ("seconds", ",.1f"),
    "images": ("images", ".4~s"),
    "updates": ("updates", ",.0f"),
    "perfect": ("perfect scaling", ",.0f"),
}
"""Titles and formats of numbers under the mouse; other fields are text."""

FAINT: Any = {
    "condition": {
        "test": "abs(datum.value / pow(10, round(log(datum.value) / LN10)) - 1) > 1e-6",
        "value": 0.4,
    },
    "value": 1,
}
"""Factor of the opacity of a grid, whose lines between powers of ten are fainter."""

CONFIG: Any = {
    "background": None,
    "font": "sans-serif",
    "view": {"stroke": None},
    "title": {
        **dict.fromkeys(("color", "subtitleColor"), "currentColor"),
        **{"fontSize": 15, "fontWeight": 600, "subtitleFontSize": 12, "anchor": "start"},
        "offset": 12,
    },
    "header": {"labelColor": "currentColor", "titleColor": "currentColor", "labelFontSize": 12},
    "axis": {
        **dict.fromkeys(("domainColor", "gridColor", "labelColor", "tickColor"), "currentColor"),
        **{"titleColor": "currentColor", "gridOpacity": 0.12, "domainOpacity": 0.5},
        **{"labelFontSize": 12, "titleFontSize": 13, "titleFontWeight": "normal"},
        **{"tickOpacity": 0.5, "labelOverlap": "greedy", "titlePadding": 8},
    },
    "legend": {
        **{"labelColor": "currentColor", "titleColor": "currentColor", "labelFontSize": 12},
        **{"orient": "bottom", "direction": "horizontal", "title": None, "symbolSize": 110},
        **{"symbolStrokeWidth": 2.5, "columnPadding": 14, "symbolOpacity": 1},
        **{"columns": 6, "layout": {"bottom": {"direction": "vertical", "anchor": "start"}}},
    },
}


@dataclass(frozen=True)
class Plot:
    """A figure, its values, its caption, and a table of its fits."""

    name: str
    title: str
    caption: str
    chart: dict[str, Any]
    """The declaration in Vega-Lite, without title and values."""
    data: Data
    fits: Table | None = None
    subtitle: str = ""

    @property
    def spec(self) -> dict[str, Any]:
        """The declaration with its title, for the page and the files."""
        return {**self.chart, "title": {"text": self.title, "subtitle": self.subtitle}}


def tips(*fields: str) -> list[tuple[str, str, str]]:
    """Return field, title and format of values under the mouse, for `layered`."""
    return [(field, *TIPS.get(field, (field, ""))) for field in fields]


def declared(chart: alt.LayerChart | alt.FacetChart) -> dict[str, Any]:
    """Return a chart as Vega-Lite; a test checks it by the schema, which takes long."""
    return {**chart.to_dict(validate=False), "config": CONFIG}


def axis(
    field: str,
    title: str,
    *,
    log: bool = False,
    low: float | None = None,
    high: float | None = None,
    values: Sequence[float] = (),
) -> dict[str, Any]:
    """Return an axis of numbers; one that is logarithmic can be switched on the page.

    Args:
        field: the field of the data.
        title: what the axis says.
        log: whether it is logarithmic.
        low: its lower end; values below are drawn there.
        high: its upper end; values above are drawn there.
        values: the places of its labels.

    """
    scale: dict[str, Any] = {"type": "log" if log else "linear", "nice": not log and high is None}
    if low is not None:
        scale |= {"domainMin": low, "clamp": True}
        scale |= {} if high is None else {"domainMax": high}
    elif not log:
        scale |= {"zero": False, "padding": 15}
    form = ".0e" if field == "time" else ".3~s" if field in WHOLE else "~g" if log else None
    ticks: dict[str, Any] = {"format": form} if form else {}
    ticks |= {"gridOpacity": FAINT} if log and not values else {}
    ticks |= {"values": list(values)} if values else {"tickCount": 6}
    return {"shorthand": f"{field}:Q", "scale": alt.Scale(**scale), "title": title, "axis": ticks}


def palette(names: Sequence[str]) -> list[str]:
    """Return a colour for each name: the paper's columns have their own."""
    spare = iter([each for each in OTHERS if each not in map(COLOURS.get, names)] * len(names))
    return [COLOURS.get(name) or next(spare) for name in names]


def layered(
    series: str,
    names: Sequence[str],
    x: dict[str, Any],
    y: dict[str, Any],
    tooltip: Sequence[tuple[str, str, str]],
    layers: Callable[[alt.Chart], Sequence[alt.Chart]],
    mouse: str = "true",
) -> dict[str, Any]:
    """Return layers over common axes and colours, with a legend that hides and a mouse layer.

    Args:
        series: the field that colours tell apart and the legend lists.
        names: its values, in the order of the legend.
        x: the x axis, from `axis`.
        y: the y axis.
        tooltip: field, title and format of each value under the mouse.
        layers: function from a chart with axes and colours to the layers to draw.
        mouse: expression that selects the rows that the mouse finds.

    """
    colours = alt.Scale(domain=list(names), range=palette(names))
    base = alt.Chart(alt.NamedData(name=NAME)).encode(
        x=alt.X(**x), y=alt.Y(**y), color=alt.Color(f"{series}:N", scale=colours, title=None)
    )
    under_mouse = alt.selection_point(
        name=HOVER, on="pointerover", nearest=True, empty=False, clear="pointerout"
    )
    points = base.mark_circle(size=70, stroke="currentColor", strokeWidth=1).encode(
        opacity=alt.condition(under_mouse, alt.value(1), alt.value(0)),
        tooltip=[
            alt.Tooltip(f"{field}:Q", title=title, format=form)
            if form
            else alt.Tooltip(f"{field}:N", title=title)
            for field, title, form in tooltip
        ],
    )
    points = points.transform_filter(mouse).properties(name=HOVER).add_params(under_mouse)
    drawn = list(layers(base))
    shown = alt.selection_point(
        name="shown",
        fields=[series],
        bind="legend",
        toggle="true",
        clear=False,
        value=[{series: name} for name in names],
    )
    drawn[0] = drawn[0].add_params(shown)
    chart = alt.layer(*(layer.transform_filter(shown) for layer in [*drawn, points]))
    return declared(chart.properties(width=520, height=330))


def ticks(low: float, high: float) -> list[float]:
    """Return the powers of ten from ``low`` to ``high``, and their doubles and halves.

    >>> ticks(0.3, 6)
    [0.5, 1.0, 2.0, 5.0]
    """
    powers = range(floor(log10(low)), ceil(log10(high)) + 1)
    steps = (float(f"{digit}e{power}") for power in powers for digit in (1, 2, 5))
    return [step for step in steps if low <= step <= high]


def markers(
    base: alt.Chart, series: str, names: Sequence[str], size: int = 75, filled: bool = False
) -> alt.Chart:
    """Return points, whose shapes tell apart those that lie on each other."""
    shapes = [SHAPES[index % len(SHAPES)] for index in range(len(names))]
    points: alt.Chart = base.mark_point(
        size=size, strokeWidth=1.8, filled=filled, opacity=1
    ).encode(
        shape=alt.Shape(
            f"{series}:N", scale=alt.Scale(domain=list(names), range=shapes), title=None
        )
    )
    return points


def rounded(values: Iterable[float]) -> list[float]:
    """Return values with five significant digits: a page need not hold sixteen.

    >>> rounded([0.123456789, 98765.4321, 0.0])
    [0.12346, 98765.0, 0.0]
    """
    return [float(f"{value:.5g}") for value in values]


def data_of(names: Sequence[str], rows: Sequence[Sequence[Any]]) -> Data:
    """Return rows of values as columns, in which floats have five significant digits.

    >>> data_of(("column", "error"), [("SB", 0.123456789), ("LB", None)])
    {'column': ['SB', 'LB'], 'error': [0.12346, None]}
    """
    return {
        name: [rounded([row[i]])[0] if isinstance(row[i], float) else row[i] for row in rows]
        for i, name in enumerate(names)
    }


def dashed(base: alt.Chart) -> alt.Chart:
    """Return dashed lines, such as fits."""
    lines: alt.Chart = base.mark_line(strokeDash=[5, 4], strokeWidth=1.4, stroke="currentColor")
    return lines


def file_name(text: str) -> str:
    """Return a text with a hyphen for each run of characters that stay out of file names."""
    return re.sub(r"[^\w.+-]+", "-", text)
