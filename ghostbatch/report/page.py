"""One self-contained HTML page from a folder of runs."""

import csv
import io
import shlex
from dataclasses import replace
from importlib.resources import files
from operator import attrgetter
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from ghostbatch import __version__
from ghostbatch.files import atomic_file, remove_leftovers
from ghostbatch.report.charts import Plot
from ghostbatch.report.drawing import VegaScript, draw_files
from ghostbatch.report.entries import entries_of
from ghostbatch.report.figures import row_figures
from ghostbatch.report.instruments import instrument_figures
from ghostbatch.report.runs import Results, read_results
from ghostbatch.report.table import (
    Table,
    by_columns,
    overview,
    row_table,
    show_rates,
    tables_of,
)
from ghostbatch.report.targets import target_figures
from ghostbatch.train import Record

RECORDS = "records.csv"


def write_report(folder: Path, figures: bool = False) -> tuple[Path, list[Table]]:
    """Write ``report.html`` and ``records.csv``; return the page and the tables of all results.

    With ``figures``, write every figure as SVG and PNG to the folder of that name, too.
    """
    with VegaScript() as vega:
        results = read_results(folder)
        measured = [*target_figures(results), *instrument_figures(results, folder)]
        plots = [*row_figures(results), *measured]
        for place in (folder, folder / "figures"):
            remove_leftovers(place)
        if figures:
            (folder / "figures").mkdir(exist_ok=True)
            for plot in plots:
                draw_files(plot.spec, plot.data, folder / "figures" / plot.name)
        _write_records(results, folder / RECORDS)
        content = _render(folder, results, plots, vega.text() if plots else "")
    target = folder / "report.html"
    with atomic_file(target) as file:
        file.write(content.encode())
    fits = [replace(plot.fits, title=plot.title) for plot in measured if plot.fits]
    return target, [*tables_of(results), *fits]


def _render(folder: Path, results: Results, plots: list[Plot], vega: str) -> str:
    rows = entries_of(results)
    environment = Environment(
        loader=PackageLoader("ghostbatch", "report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    data = {id(plot.data): plot.data for plot in plots}  # figures of a row share their values
    places = list(data)
    figures = [{"spec": plot.chart, "data": places.index(id(plot.data))} for plot in plots]
    return environment.get_template("page.html.j2").render(
        title=results.study.name,
        version=__version__,
        study=results.study,
        overviews=[overview(group) for group in by_columns(rows) if len(group) > 1],
        rows={row: (row_table(entries), entries) for row, entries in rows.items()},
        notes={name: row.note for name, row in results.study.rows.items() if row.note},
        unreadable=[
            f"{row} {line}".strip() for row, lines in results.unreadable.items() for line in lines
        ],
        show_rates=show_rates,
        path_of=lambda run: _path(run.folder, folder),
        plots=plots,
        figures={"figures": figures, "data": list(data.values())},
        records=RECORDS if results.rows else "",
        style=_text("page.css"),
        behaviour=_text("page.js"),
        vega=vega,
    )


def _text(name: str) -> str:
    return files("ghostbatch.report").joinpath(name).read_text(encoding="utf-8")


def _path(run: Path, folder: Path) -> str:
    """Return the path of a run as a command takes it, from where the report's folder was named."""
    return shlex.quote(str(folder / run.relative_to(folder.resolve())))


def _write_records(results: Results, target: Path) -> None:
    """Write the records that the figures are made from as CSV, if there are any runs."""
    if not results.rows:
        return
    names = list(Record.__dataclass_fields__)
    values_of = attrgetter(*names)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["row", "column", "seed", *names])
    for row, groups in results.rows.items():
        for group in groups:
            for run in group.runs:
                place = (row, group.column, run.seed)
                writer.writerows((*place, *values_of(record)) for record in run.records.shown)
    with atomic_file(target) as file:
        file.write(text.getvalue().encode())
