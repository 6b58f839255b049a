"""One self-contained HTML page from a folder of runs."""

from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from ghostbatch import __version__
from ghostbatch.recipe import Plan
from ghostbatch.report.figures import draw_figures
from ghostbatch.report.runs import group_runs, read_runs
from ghostbatch.report.table import HEADERS, Table, tables
from ghostbatch.train.files import atomic_file


def write_report(folder: Path) -> tuple[Path, list[Table]]:
    """Make ``report.html`` and ``figures/`` in a folder of runs; return the page and its tables."""
    runs = read_runs(folder)
    groups = group_runs(runs)
    lines = tables(groups)
    page = Environment(
        loader=PackageLoader("ghostbatch", "report"), autoescape=True, undefined=StrictUndefined
    ).get_template("page.html.j2")
    content = page.render(
        title=folder.resolve().name,
        version=__version__,
        headers=HEADERS,
        tables=lines,
        plots=draw_figures(groups, folder / "figures"),
        plans=[(group.column, group.runs[0].plan) for group in groups if group.runs],
        rates=show_rates,
        devices=sorted({run.device for run in runs}),
    )
    target = folder / "report.html"
    with atomic_file(target) as file:
        file.write(content.encode())
    return target, lines


def show_rates(plan: Plan) -> str:
    """The rates of a plan and the updates at which they begin."""
    starts = (0, *plan.drop_updates)
    latest = "at most " if plan.recipe.hold == "distance" else ""
    shown = (f"({latest if start else ''}{start})" for start in starts)
    return ", ".join(
        f"{plan.rates(start).lr:.4g} {when}" for start, when in zip(starts, shown, strict=True)
    )
