"""``ghostbatch report``: tables, figures and an HTML page from a folder of runs."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from ghostbatch.cli.flags import parse
from ghostbatch.report.page import write_report
from ghostbatch.report.terminal import plain_console, print_tables


@dataclass(frozen=True)
class ReportOptions:
    """Write tables, figures and an HTML page from a folder of runs."""

    folder: tyro.conf.Positional[Annotated[Path, tyro.conf.arg(metavar="FOLDER")]]
    """The folder of a study or of a run."""


def command(argv: Sequence[str]) -> None:
    """Write the page again, from the folder alone."""
    print_report(parse(ReportOptions, argv, "report").folder, plain_console())


def print_report(folder: Path, console: Console) -> None:
    """Write the page of a folder of runs; print its tables and the page's path."""
    page, tables = write_report(folder)
    print_tables(tables, console)
    console.print(f"report: {page}", soft_wrap=True)
