"""``ghostbatch report``: tables, figures and an HTML page from a folder of runs."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from ghostbatch.cli.flags import parse
from ghostbatch.errors import InputError
from ghostbatch.report.exports import EXPORTS
from ghostbatch.report.runs import read_results
from ghostbatch.report.table import tables_of
from ghostbatch.report.terminal import plain_console, print_tables


@dataclass(frozen=True)
class ReportOptions:
    """Write tables, figures and an HTML page from a folder of runs, or print the results."""

    folder: tyro.conf.Positional[Annotated[Path, tyro.conf.arg(metavar="FOLDER")]]
    """The folder of a study or of a run."""
    figures: bool = False
    """Write every figure as SVG and PNG, too; the page offers them one by one."""
    markdown: bool = False
    """Print the tables as Markdown, and write nothing."""
    latex: bool = False
    """Print the paper's table as LaTeX, which needs booktabs, and write nothing."""
    csv: bool = False
    """Print a line for each run as CSV, and write nothing."""
    json: bool = False
    """Print rows, columns and runs as JSON, and write nothing."""


def command(argv: Sequence[str]) -> None:
    """Write the page again, from the folder alone; or print one export."""
    options = parse(ReportOptions, argv, "report")
    chosen = [name for name in EXPORTS if getattr(options, name)]
    if len(chosen) > 1:
        raise InputError(chosen[1], f"{chosen[0]} was asked for, too", "leave out one of them")
    if chosen:
        print(EXPORTS[chosen[0]](read_results(options.folder)))
    else:
        print_report(options.folder, plain_console(), options.figures)


def print_report(folder: Path, console: Console, figures: bool = False) -> None:
    """Write the page of a folder of runs; print its tables and the page's path."""
    try:
        from ghostbatch.report.page import write_report  # noqa: PLC0415 (draws)
    except ModuleNotFoundError as error:
        if error.name not in ("altair", "vl_convert"):
            raise
        print_tables(tables_of(read_results(folder)), console)
        remedy = "run pip install altair vl-convert-python, then ghostbatch report again"
        raise InputError("report", f"{error.name} is not installed", remedy) from None
    page, tables = write_report(folder, figures)
    print_tables(tables, console)
    console.print(f"report: {page}", soft_wrap=True)
