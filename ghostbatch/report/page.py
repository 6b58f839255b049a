"""One self-contained HTML page from a folder of runs."""

from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from ghostbatch import __version__
from ghostbatch.files import atomic_file
from ghostbatch.report.figures import draw_figures
from ghostbatch.report.instruments import draw_instruments
from ghostbatch.report.runs import read_results
from ghostbatch.report.table import HEADERS, Table, show_rates, tables


def write_report(folder: Path) -> tuple[Path, list[Table]]:
    """Write ``report.html`` and ``figures/`` into a folder of runs; return the page and tables."""
    results = read_results(folder)
    groups, rows = results.groups, results.manifest.rows
    lines = tables(groups)
    several = len({group.row for group in groups}) > 1
    page = Environment(
        loader=PackageLoader("ghostbatch", "report"), autoescape=True, undefined=StrictUndefined
    ).get_template("page.html.j2")
    content = page.render(
        title=folder.resolve().name,
        version=__version__,
        headers=HEADERS,
        tables=lines,
        notes=dict.fromkeys(rows[group.row].note for group in groups if rows[group.row].note),
        plots=[
            *draw_figures(results, folder / "figures"),
            *draw_instruments(results.manifest.instruments, folder),
        ],
        plans=[
            (f"{group.row}, " * several + group.column, group.runs[0].plan)
            for group in groups
            if group.runs
        ],
        rates=show_rates,
        devices=results.devices,
    )
    target = folder / "report.html"
    with atomic_file(target) as file:
        file.write(content.encode())
    return target, lines
