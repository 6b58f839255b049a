"""The figures of a study's runs: error against updates and epochs, and weight distance."""

import io
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ghostbatch.errors import InputError, check_choice
from ghostbatch.files import atomic_file
from ghostbatch.report.growth import describe_growth, fit_growth
from ghostbatch.report.runs import Group, Results
from ghostbatch.study import Row
from ghostbatch.train import Record

INK = "#010203"
"""Colour of text and axes; on the page it becomes the colour of the page's text."""

COLOURS = {"SB": "#888e99", "LB": "#d1495b", "+LR": "#dd8a00", "+GBN": "#3b8fd4", "+RA": "#2a9d6f"}
OTHERS = ("#8d6cc4", "#b0722e", "#5f9ea0", "#c2577f")

FLOOR = 0.5
"""Lower end of the error axis, in percent; smaller errors would squash the other curves."""

STYLE: Any = {
    "figure.figsize": (4.8, 3.6),
    "font.size": 10,
    "font.family": "sans-serif",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "legend.frameon": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "ghostbatch",
    **dict.fromkeys(
        ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK
    ),
}


@dataclass(frozen=True)
class Plot:
    """A figure and its caption."""

    figure: Figure
    title: str
    caption: str

    @cached_property
    def svg(self) -> str:
        """The drawing as an SVG file."""
        drawing = io.StringIO()
        with mpl.rc_context(STYLE):
            self.figure.savefig(drawing, format="svg", transparent=True, metadata={"Date": None})
        return drawing.getvalue()

    def write(self, folder: Path, name: str) -> None:
        """Write SVG and PNG files."""
        folder.mkdir(parents=True, exist_ok=True)
        with atomic_file(folder / f"{name}.svg") as file:
            file.write(self.svg.encode())
        with atomic_file(folder / f"{name}.png") as file:
            self.figure.savefig(file, format="png", dpi=200, facecolor="white")

    def on_page(self) -> str:
        """Return the drawing for a page, with lines and text in the page's text colour."""
        drawing = self.svg[self.svg.index("<svg") :].replace(INK, "currentColor")
        return re.sub(r' id="[a-z0-9_.]+_\d+"', "", drawing)  # would clash with other figures'


@mpl.rc_context(STYLE)
def draw_figures(results: Results, folder: Path) -> list[Plot]:
    """Draw the figures that each row declares, as SVG and PNG files; return them for the page."""
    plots = []
    drawn = {row: [g for g in groups if g.finished] for row, groups in results.rows.items()}
    drawn = {row: groups for row, groups in drawn.items() if groups}
    for row, groups in drawn.items():
        for kind in results.study.rows.get(row, Row({})).figures:
            check_choice(f"figures of row {row}", kind, KINDS)
            plot, name = KINDS[kind](groups), kind
            if len(drawn) > 1:
                plot = replace(plot, caption=f"{row}: {plot.caption}")
                name = re.sub(r"[^\w.+-]+", "-", f"{row}-{kind}")  # a row may hold a path
            plot.write(folder, name)
            plots.append(plot)
    return plots


def _errors(groups: list[Group], unit: str) -> Plot:
    figure, axes = new_axes(unit, "error %")
    for group, colour in _coloured(groups):
        for split, line in (("train", ":"), ("validation", "-")):
            t, accuracy = _curves(group, split, unit, "accuracy")
            label = _label(group) if split == "validation" else None
            axes.plot(t, (100 - accuracy).mean(0), line, color=colour, label=label, lw=1.5)
            if split == "validation":
                _band(axes, t, 100 - accuracy, colour)
    axes.set_yscale("log")
    axes.set_ylim(bottom=FLOOR)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_minor_formatter("")
    axes.legend(loc="lower left")
    caption = (
        f"Error against {unit}s. Solid lines are the validation error: the mean over seeds, with a "
        "band of one standard deviation. Dotted lines are the error on the training batches."
    )
    return Plot(figure, f"Error against {unit}s", caption)


def _distance(groups: list[Group]) -> Plot:
    figure, axes = new_axes("update", "distance from the initial weights")
    fits = {fit.column: fit for fit in fit_growth(groups)}
    found = describe_growth(list(fits.values()))
    for group, colour in _coloured(groups):
        t, distance = _curves(group, "train", "update", "distance")
        axes.plot(t, distance.mean(0), "o", color=colour, ms=2.5, label=_label(group))
        _band(axes, t, distance, colour)
        if group.column in fits:
            mean, line = fits[group.column].mean, np.geomspace(*fits[group.column].window, 50)
            axes.plot(line, mean.intercept + mean.slope * np.log(line), color=colour, lw=1)
    axes.set_ylim(bottom=0)
    axes.legend(loc="upper left")
    caption = f"Distance of the weights from their initial values, the mean over seeds. {found}"
    return Plot(figure, "Weight distance", caption)


def _accuracy_by_distance(groups: list[Group]) -> Plot:
    """Plot final accuracy against final distance; fit the effect of doubling the first phase."""
    figure, axes = new_axes("distance from the initial weights at the end", "test accuracy %")
    axes.set_xscale("linear")
    lengths, ends = [], []
    for group, colour in _coloured(groups):
        distance = np.array(group.over_seeds(lambda s: s.distance))
        accuracy = np.array(group.over_seeds(lambda s: s.accuracy))
        across, up = (each.std(ddof=min(1, len(each) - 1)) for each in (distance, accuracy))
        means = distance.mean(), accuracy.mean()
        axes.errorbar(*means, up, across, "o", color=colour, label=_label(group))
        drops = group.runs[0].plan.drop_updates
        if not drops:
            problem = f"accuracy-by-distance needs a drop of the rate, and {group.column} has none"
            raise InputError("figures", problem, "leave this figure out of the row")
        lengths += [float(np.log2(drops[0]))] * len(accuracy)
        ends += accuracy.tolist()
    axes.legend(loc="lower right")
    caption = (
        "Test accuracy at the end against the distance of the weights from their initial values. "
        "The columns differ in the length of the first phase, at the high learning rate; the later "
        "phases are the same. Points are means over seeds, bars one standard deviation."
    )
    if len(set(lengths)) > 1:
        slope, (low, high) = slope_with_interval(np.array(lengths), np.array(ends))
        caption += (
            f" Doubling the first phase changes the accuracy by {slope:.2f} points (95 % bootstrap "
            f"interval {low:.2f} to {high:.2f})."
        )
    return Plot(figure, "Train longer", caption)


KINDS: dict[str, Callable[[list[Group]], Plot]] = {
    "error-by-update": partial(_errors, unit="update"),
    "error-by-epoch": partial(_errors, unit="epoch"),
    "distance": _distance,
    "accuracy-by-distance": _accuracy_by_distance,
}
"""Figures that a row of a study may have, by the name of their files."""


def slope_with_interval(
    x: np.ndarray, y: np.ndarray, resamples: int = 2000
) -> tuple[float, tuple[float, float]]:
    """Return the slope of a line through points, and its 95 % bootstrap interval over points.

    >>> slope, (low, high) = slope_with_interval(np.arange(9.0), 2 * np.arange(9.0))
    >>> round(slope, 6), round(low, 6), round(high, 6)
    (2.0, 2.0, 2.0)
    """
    draw = np.random.default_rng(0)
    slopes = []
    for chosen in draw.integers(0, len(x), (resamples, len(x))):
        if np.ptp(x[chosen]) > 0:
            slopes.append(np.polyfit(x[chosen], y[chosen], 1)[0])
    low, high = np.quantile(slopes, [0.025, 0.975])
    return float(np.polyfit(x, y, 1)[0]), (float(low), float(high))


def _curves(group: Group, split: str, time: str, value: str) -> tuple[np.ndarray, np.ndarray]:
    """Return a field of the records at the updates after 0 that all finished seeds have.

    The times have shape (times), the values (seeds, times).
    """
    kept = [[r for r in run.records.shown if r.split == split] for run in group.finished]
    return _shared(kept, time, value)


def _shared(seeds: list[list[Record]], time: str, value: str) -> tuple[np.ndarray, np.ndarray]:
    """Return what `_curves` does, for the records of each seed."""
    kept = [{r.update: r for r in records if r.update > 0} for records in seeds]
    shared = sorted(set.intersection(*map(set, kept)))
    times = np.array([getattr(kept[0][update], time) for update in shared])
    return times, np.array([[getattr(seed[update], value) for update in shared] for seed in kept])


def _band(axes: Axes, t: np.ndarray, values: np.ndarray, colour: str) -> None:
    if len(values) > 1:
        middle, deviation = values.mean(0), values.std(0, ddof=1)
        axes.fill_between(t, middle - deviation, middle + deviation, color=colour, alpha=0.2, lw=0)


def _label(group: Group) -> str:
    """Return the column's name for a legend; matplotlib reads text between dollars as a formula."""
    return group.column.replace("$", r"\$")


def _coloured(groups: list[Group]) -> Iterator[tuple[Group, str]]:
    spare = iter(OTHERS * len(groups))
    for group in groups:
        yield group, COLOURS.get(group.column) or next(spare)


def new_axes(x: str, y: str) -> tuple[Figure, Axes]:
    """Return an empty figure with a logarithmic x axis."""
    figure = Figure(layout="constrained")
    axes = figure.add_subplot(xscale="log", xlabel=x, ylabel=y)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    return figure, axes
