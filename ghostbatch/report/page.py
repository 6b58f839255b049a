"""One self-contained HTML page from a folder of runs."""

from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from ghostbatch import __version__
from ghostbatch.files import atomic_file, remove_leftovers
from ghostbatch.report.figures import draw_figures
from ghostbatch.report.instruments import draw_instruments
from ghostbatch.report.runs import read_results
from ghostbatch.report.table import HEADERS, Table, show_rates, table_of


def write_report(folder: Path) -> tuple[Path, list[Table]]:
    """Write ``report.html`` and ``figures/`` into a folder of runs; return the page and tables."""
    results = read_results(folder)
    for place in (folder, folder / "figures"):
        remove_leftovers(place)
    unreadable = dict(results.unreadable)
    tables = [
        table_of(row, groups, unreadable.pop(row, ())) for row, groups in results.rows.items()
    ]
    cells = [(row, group) for row, groups in results.rows.items() for group in groups]
    notes = [row.note for name, row in results.study.rows.items() if name in results.rows]
    notes += [f"{row} {line}".strip() for row, lines in unreadable.items() for line in lines]
    page = Environment(
        loader=PackageLoader("ghostbatch", "report"), autoescape=True, undefined=StrictUndefined
    ).get_template("page.html.j2")
    content = page.render(
        title=folder.resolve().name,
        version=__version__,
        headers=HEADERS,
        tables=tables,
        notes=dict.fromkeys(filter(None, notes)),
        plots=[*draw_figures(results, folder / "figures"), *draw_instruments(results, folder)],
        plans=[
            (f"{row}, " * (len(results.rows) > 1) + group.column, group.runs[0].plan)
            for row, group in cells
            if group.finished
        ],
        rates=show_rates,
        devices=sorted({run.device for _, group in cells for run in group.runs}),
    )
    target = folder / "report.html"
    with atomic_file(target) as file:
        file.write(content.encode())
    return target, tables
