"""The figures of a study: error against updates and epochs, and how far the weights walk."""

import io
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ghostbatch.diagnostics import DiffusionFit, fit_diffusion
from ghostbatch.files import atomic_file
from ghostbatch.report.runs import Group
from ghostbatch.train import Record

INK = "#010203"
"""Text and axes; on the page this colour becomes that of the text around the figure."""

COLOURS = {"SB": "#888e99", "LB": "#d1495b", "+LR": "#dd8a00", "+GBN": "#3b8fd4", "+RA": "#2a9d6f"}
FLOOR = 0.5
"""Percent of error below which the training curves are cut off; the others are the point."""

OTHERS = ("#8d6cc4", "#b0722e", "#5f9ea0", "#c2577f")

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
    """A finished figure and the sentence that goes with it."""

    name: str
    title: str
    caption: str
    svg: str

    def on_page(self) -> str:
        """The drawing for a page, light or dark: its ink is the colour of the page's text."""
        drawing = self.svg[self.svg.index("<svg") :].replace(INK, "currentColor")
        return re.sub(r' id="[a-z0-9_.]+_\d+"', "", drawing)  # would clash with other figures'


def draw_figures(groups: list[Group], folder: Path) -> list[Plot]:
    """Draw all figures, as SVG and PNG files in ``folder``; return them for the page."""
    folder.mkdir(parents=True, exist_ok=True)
    plots = []
    rows = list(dict.fromkeys(group.row for group in groups if group.runs))
    for row in rows:
        shown = [group for group in groups if group.row == row and group.runs]
        prefix = f"{row.replace(' ', '-')}-" if len(rows) > 1 else ""
        kinds = [_error_by_update, _error_by_epoch, _distance]
        if row == "longer":
            kinds.append(_longer)
        for draw in kinds:
            with mpl.rc_context(STYLE):
                plot = draw(shown, folder, prefix)
            plots.append(replace(plot, caption=f"{row}: {plot.caption}") if prefix else plot)
    return plots


def _error_by_update(groups: list[Group], folder: Path, prefix: str) -> Plot:
    return _errors(groups, folder, f"{prefix}error-by-update", "update", lambda r: r.update)


def _error_by_epoch(groups: list[Group], folder: Path, prefix: str) -> Plot:
    return _errors(groups, folder, f"{prefix}error-by-epoch", "epoch", lambda r: r.epoch)


def _errors(
    groups: list[Group], folder: Path, name: str, unit: str, time: Callable[[Record], float]
) -> Plot:
    figure, axes = new_axes(unit, "error %")
    for group, colour in _coloured(groups):
        for split, line in (("train", ":"), ("validation", "-")):
            t, error = _curves(group, split, time, lambda r: 100 - r.accuracy)
            label = group.column if split == "validation" else None
            axes.plot(t, error.mean(0), line, color=colour, label=label, lw=1.5)
            if split == "validation":
                _band(axes, t, error, colour)
    axes.set_yscale("log")
    axes.set_ylim(bottom=FLOOR)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_minor_formatter("")
    axes.legend(loc="lower left")
    caption = (
        f"Error against {unit}: validation (solid, mean over seeds, band of one standard deviation)"
        " and training batches (dotted)."
    )
    return finish(figure, folder, name, f"Error against {unit}s", caption)


def _distance(groups: list[Group], folder: Path, prefix: str) -> Plot:
    figure, axes = new_axes("update", "distance from the initial weights")
    slopes = []
    for group, colour in _coloured(groups):
        t, distance = _curves(group, "train", lambda r: r.update, lambda r: r.distance)
        axes.plot(t, distance.mean(0), "o", color=colour, ms=2.5, label=group.column)
        _band(axes, t, distance, colour)
        if (fit := fit_first_phase(group)) is not None:
            drop = _first_phase_end(group)
            line = np.geomspace(1, drop, 50)
            axes.plot(line, fit.intercept + fit.slope * np.log(line), color=colour, lw=1)
            low, high = fit.slope_interval
            slopes.append(
                f"{group.column} {fit.slope:.2f} in [{low:.2f}, {high:.2f}] ({fit.better} t fits "
                f"better, by {fit.aic_margin:.0f} of AIC)"
            )
    axes.set_ylim(bottom=0)
    axes.legend(loc="upper left")
    caption = (
        "Weight distance against update (log axis), mean over seeds. Lines: d = a + b ln t fitted "
        f"before the first drop; slope b with its 95 % interval, and whether ln t or "
        f"sqrt t fits better: {'; '.join(slopes) or 'none'}."
    )
    return finish(figure, folder, f"{prefix}distance", "How far the weights walk", caption)


def _longer(groups: list[Group], folder: Path, prefix: str) -> Plot:
    """The title's claim: the longer the high-rate phase, the better the end."""
    figure, axes = new_axes("distance from the initial weights at the end", "test accuracy %")
    axes.set_xscale("linear")
    lengths, ends = [], []
    for group, colour in _coloured(groups):
        found = [(run.summary.distance, run.summary.accuracy) for run in group.runs if run.summary]
        distance, accuracy = np.array(found).T
        axes.errorbar(
            *(distance.mean(), accuracy.mean(), accuracy.std(ddof=min(1, len(found) - 1))),
            *(distance.std(ddof=min(1, len(found) - 1)), "o"),
            color=colour,
            label=group.column,
        )
        lengths += [float(np.log2(group.runs[0].plan.drop_updates[0]))] * len(found)
        ends += accuracy.tolist()
    axes.legend(loc="lower right")
    caption = (
        "Test accuracy at the end against the distance walked, by the length of the first phase, "
        "at the high rate; the phases after it are the same. Mean and standard deviation over "
        "seeds."
    )
    if len(set(lengths)) > 1:
        slope, (low, high) = slope_with_interval(np.array(lengths), np.array(ends))
        caption += (
            f" Doubling the first phase changes the accuracy by {slope:.2f} points (95 % bootstrap "
            f"interval {low:.2f} to {high:.2f})."
        )
    return finish(figure, folder, f"{prefix}accuracy-by-distance", "Train longer", caption)


def slope_with_interval(
    x: np.ndarray, y: np.ndarray, resamples: int = 2000
) -> tuple[float, tuple[float, float]]:
    """The slope of a line through points, and the 95 % interval of its bootstrap over points.

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


def fit_first_phase(group: Group) -> DiffusionFit | None:
    """The fit to the mean distance before the first drop; None where there is too little of it."""
    t, distance = _curves(group, "train", lambda r: r.update, lambda r: r.distance)
    first = t <= _first_phase_end(group)
    if first.sum() < 4:
        return None
    return fit_diffusion(t[first].tolist(), distance.mean(0)[first].tolist())


def _first_phase_end(group: Group) -> int:
    """The first drop of any run; those that follow a distance show it by their rate."""
    plan = group.runs[0].plan
    if plan.recipe.hold != "distance":
        return (*plan.drop_updates, plan.updates)[0]
    return min(max(r.update for r in run.records if r.lr >= plan.regime.lr) for run in group.runs)


def _curves(
    group: Group, split: str, time: Callable[[Record], float], value: Callable[[Record], float]
) -> tuple[np.ndarray, np.ndarray]:
    """Times that all seeds have, and values of shape (seeds, times), after the first update."""
    kept = [
        {r.update: r for r in run.records if r.split == split and r.update > 0}
        for run in group.runs
    ]
    shared = sorted(set.intersection(*(set(records) for records in kept)))
    times = np.array([time(kept[0][update]) for update in shared])
    return times, np.array([[value(records[update]) for update in shared] for records in kept])


def _band(axes: Axes, t: np.ndarray, values: np.ndarray, colour: str) -> None:
    if len(values) > 1:
        middle, deviation = values.mean(0), values.std(0, ddof=1)
        axes.fill_between(t, middle - deviation, middle + deviation, color=colour, alpha=0.2, lw=0)


def _coloured(groups: list[Group]) -> Iterator[tuple[Group, str]]:
    spare = iter(OTHERS * len(groups))
    for group in groups:
        yield group, COLOURS.get(group.column) or next(spare)


def new_axes(x: str, y: str) -> tuple[Figure, Axes]:
    """An empty figure with time on a log axis."""
    figure = Figure(layout="constrained")
    axes = figure.add_subplot(xscale="log", xlabel=x, ylabel=y)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    return figure, axes


def finish(figure: Figure, folder: Path, name: str, title: str, caption: str) -> Plot:
    """Write a figure as SVG and PNG; return it for the page."""
    drawing = io.StringIO()
    figure.savefig(drawing, format="svg", transparent=True, metadata={"Date": None})
    svg = drawing.getvalue()
    with atomic_file(folder / f"{name}.svg") as file:
        file.write(svg.encode())
    with atomic_file(folder / f"{name}.png") as file:
        figure.savefig(file, format="png", dpi=200, facecolor="white")
    return Plot(name, title, caption, svg)
