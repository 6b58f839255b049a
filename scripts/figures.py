"""The figures of docs/theory.md and the table of docs/choosing.md.

    python scripts/figures.py

writes them, from closed forms and the published runs in results/. A test checks that they are
current.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import altair as alt

from ghostbatch.optim import lr_scale
from ghostbatch.recipe import Recipe
from ghostbatch.recipes import find_recipe
from ghostbatch.report.charts import axis, layered, rounded
from ghostbatch.report.drawing import draw_svg
from ghostbatch.report.entries import paired_gap, show_gap
from ghostbatch.study import STUDIES
from ghostbatch.study.rows import paper_row
from results import NAMES, WARM_UP, read

HERE = Path(__file__).resolve().parents[1]
FIGURES, CHOOSING = HERE / "docs" / "figures", HERE / "docs" / "choosing.md"
RESNET44 = HERE / "results" / "table1" / "resnet44-cifar10"

SAMPLES, BASE, LARGE, GHOST = 50_000, 128, 4096, 128
"""CIFAR-10, and the sizes of the paper's table 1."""

MARKS = "<!-- changes: made by scripts/figures.py -->", "<!-- end of changes -->"
CHANGES = {
    "rate × √(batch ratio)": ("LB", "+LR"),
    "ghosts of 128": ("+LR", "+GBN"),
    "as many updates as SB": ("+GBN", "+RA"),
    "all of it, against SB": ("SB", "+RA"),
}
"""What is changed, and the columns of table 1 before and after."""


def files() -> dict[Path, str]:
    """Return the content of every file that this script makes."""
    made = {"theory-covariance": covariance, "theory-rates": rates, "theory-distance": distance}
    before, _, rest = CHOOSING.read_text().partition(MARKS[0])
    after = rest.partition(MARKS[1])[2]
    page = "\n".join([before + MARKS[0], "", *changes(), "", MARKS[1] + after])
    return {CHOOSING: page, **{FIGURES / f"{name}.svg": make() for name, make in made.items()}}


def changes() -> list[str]:
    """Return a table of what each change brought, in points of accuracy, by network."""
    rows = {
        row: {group.column: group.ends("accuracy") for group in results.rows[row]}
        for row, results in read("table1").items()
    }
    lines = [
        f"| change | {' | '.join(NAMES[row] for row in rows)} | the paper, six networks |",
        "|---" * (len(rows) + 2) + "|",
    ]
    for what, (before, after) in CHANGES.items():
        found = [_gain(cells, before, after) for cells in rows.values()]
        lines.append(f"| {what} | {' | '.join(found)} | {_papers_gain(before, after)} |")
    for column in ("LB", "+LR", "+GBN"):
        found = [_gain(cells, column, f"{column}{WARM_UP}") for cells in rows.values()]
        lines.append(f"| warm-up of 5 epochs, {column} | {' | '.join(found)} | – |")
    return lines


def _gain(cells: dict[str, dict[int, float]], before: str, after: str) -> str:
    """Return the mean gain over the seeds of both columns, also that with a warm-up in both."""
    pairs = {"": (before, after), "; warm-up ": (f"{before}{WARM_UP}", f"{after}{WARM_UP}")}
    shown = [
        prefix + show_gap(paired_gap(*(cells[name] for name in pair[::-1])))
        for prefix, pair in pairs.items()
        if cells.keys() >= set(pair)
    ]
    return "".join(shown) or "–"


def _papers_gain(before: str, after: str) -> str:
    """Return the smallest and the largest gain in the paper's table 1."""
    rows = (row.paper for row in STUDIES["table1"]().rows.values())
    gains = [row[after] - row[before] for row in rows]
    return f"{min(gains):+.2f} to {max(gains):+.2f}"


def covariance() -> str:
    """Return the covariance of one weight update against the batch, relative to the base batch.

    That of the mean of B gradients, drawn without replacement from N, is (N - B) / (B (N - 1))
    times that of one gradient; the rate multiplies it by its square.
    """

    def relative(batch: int, rule: str) -> float:
        left = (SAMPLES - batch) / (SAMPLES - BASE)
        return left * BASE / batch * lr_scale(batch, BASE, rule) ** 2

    batches = [round(BASE * 2 ** (power / 4)) for power in range(25)]
    points = [(r, b, relative(b, r)) for r in ("none", "sqrt", "linear") for b in batches]
    x = axis("batch", "batch", log=True, values=[BASE * 2**power for power in range(7)])
    y = axis("covariance", "covariance of an update, base batch = 1", log=True)
    names = ("batch", "covariance")
    return _drawn("Covariance of one update, by the rule of the rate", names, points, x, y)


def rates() -> str:
    """Return the learning rate against updates in the paper's columns of ResNet44."""
    columns = paper_row(find_recipe("resnet44-cifar10"), LARGE, GHOST).columns
    points = [(c, *step) for c in ("SB", "LB", "+LR", "+RA") for step in _steps(columns[c])]
    x = axis("update", "update", log=True, low=100)
    y = axis("lr", "learning rate", log=True, low=5e-5, high=1)
    return _drawn("When the learning rate drops", ("update", "lr"), points, x, y)


def _steps(recipe: Recipe) -> list[tuple[int, float]]:
    """Return both ends of each phase of a recipe: the update, and the learning rate."""
    plan = recipe.plan(SAMPLES)
    ends = [1, *plan.drop_updates, plan.updates]
    lrs = [plan.regime.phase(number).lr for number in range(len(ends) - 1)]
    return [(ends[number + side], lr) for number, lr in enumerate(lrs) for side in (0, 1)]


def distance() -> str:
    """Return measured weight distances of ResNet44, seed 0, before the first drop of the rate."""
    points = []
    for series in ("SB", "LB", "+GBN", f"+GBN{WARM_UP}"):
        run = json.loads((RESNET44 / series.replace(", ", "-") / "seed-0.json").read_text())
        records = [dict(zip(run["fields"], values, strict=True)) for values in run["validation"]]
        highest = max(record["lr"] for record in records)
        for record in records:
            if record["update"] and (record["lr"] == highest or record["epoch"] <= 5):
                points.append((series, record["update"], record["distance"]))
    x, y = axis("update", "update", log=True), axis("distance", "distance from the initial weights")
    title = "Weight distance in the first phase, measured"
    return _drawn(title, ("update", "distance"), points, x, y, circles=True)


def _drawn(
    title: str,
    names: tuple[str, str],
    points: Sequence[tuple[str, float, float]],
    x: dict[str, Any],
    y: dict[str, Any],
    circles: bool = False,
) -> str:
    """Return a line for each series of points over the axes, as SVG; ``names`` are the axes'."""

    def layers(base: alt.Chart) -> Sequence[alt.Chart]:
        lines = base.mark_line(strokeWidth=2)
        return [lines, base.mark_circle(size=30, opacity=1)] if circles else [lines]

    series, *numbers = (list(column) for column in zip(*points, strict=True))
    rows = dict(zip(names, map(rounded, numbers), strict=True))
    tooltip = [(name, name, "") for name in ("series", *names)]
    spec = layered("series", list(dict.fromkeys(series)), x, y, tooltip, layers)
    return draw_svg({**spec, "title": {"text": title}}, {"series": series, **rows})


if __name__ == "__main__":
    for path, text in files().items():
        path.write_text(text)
