"""One self-contained HTML page from a folder of runs."""

from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from ghostbatch import __version__
from ghostbatch.files import atomic_file
from ghostbatch.recipe import Plan
from ghostbatch.report.figures import draw_figures
from ghostbatch.report.instruments import draw_instruments, has_instruments
from ghostbatch.report.runs import Group, group_runs, read_runs
from ghostbatch.report.table import HEADERS, Table, tables


def write_report(folder: Path) -> tuple[Path, list[Table]]:
    """Make ``report.html`` and ``figures/`` in a folder of runs; return the page and its tables."""
    runs = (
        [] if has_instruments(folder) and not any(folder.rglob("run.json")) else read_runs(folder)
    )
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
        plots=[*draw_figures(groups, folder / "figures"), *draw_instruments(folder)],
        cumulative=any(group.column == "LB" for group in groups),
        plans=[(_place(group, groups), group.runs[0].plan) for group in groups if group.runs],
        rates=show_rates,
        devices=sorted({run.device for run in runs}),
    )
    target = folder / "report.html"
    with atomic_file(target) as file:
        file.write(content.encode())
    return target, lines


def _place(group: Group, groups: list[Group]) -> str:
    """The column, and the row where there are several."""
    return group.column if len({g.row for g in groups}) == 1 else f"{group.row}, {group.column}"


def show_rates(plan: Plan) -> str:
    """The rates of a plan and the updates at which they begin."""
    starts = (0, *plan.drop_updates)
    latest = "at most " if plan.recipe.hold == "distance" else ""
    shown = (f"({latest if start else ''}{start})" for start in starts)
    return ", ".join(
        f"{plan.rates(start).lr:.4g} {when}" for start, when in zip(starts, shown, strict=True)
    )
