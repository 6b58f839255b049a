"""What a person sees in the terminal: the live progress of a study, and tables."""

import time
from collections.abc import Sequence
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.table import Table as Grid
from rich.text import Text

from ghostbatch.report.table import HEADERS, Table
from ghostbatch.study import Cell
from ghostbatch.train import Record, Summary


class StudyProgress:
    """Shows the cells that are running: a live panel in a terminal, plain lines elsewhere."""

    def __init__(self, cells: Sequence[Cell], console: Console) -> None:
        self._cells = list(cells)
        self._console = console
        self._ended: dict[Cell, Summary] = {}
        self._running: dict[Cell, Record] = {}
        self._accuracy: dict[Cell, float] = {}
        self._before: float | None = None
        self._began = time.monotonic()
        self._live = Live(console=console, get_renderable=self._draw, refresh_per_second=4)

    def __enter__(self) -> "StudyProgress":
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._console.is_terminal:
            self._live.stop()

    def news(self, cell: Cell, item: Record | Summary) -> None:
        """Take in a record or the end of a cell."""
        if isinstance(item, Summary):
            self._running.pop(cell, None)
            self._ended[cell] = item
            if not self._console.is_terminal:
                count = f"[{len(self._ended)}/{len(self._cells)}]"
                accuracy = "diverged" if item.status == "diverged" else f"{item.accuracy:.1f} %"
                self._console.print(
                    f"{count} {_name(cell)}: {accuracy}, {self._left()}", highlight=False
                )
            return
        if self._before is None:
            self._before = self._work()  # done in an earlier session, or restored just now
            self._began = time.monotonic()
        self._running[cell] = item
        if item.split == "validation":
            self._accuracy[cell] = item.accuracy

    def _work(self) -> float:
        """Samples' worth of work done so far."""
        going = (c.cost * r.update / c.plan.updates for c, r in self._running.items())
        return sum(cell.cost for cell in self._ended) + sum(going)

    def _left(self) -> str:
        """Time left, at the pace of this session."""
        total = sum(cell.cost for cell in self._cells)
        done, elapsed = self._work(), time.monotonic() - self._began
        if done >= total:
            return f"{clock(elapsed)} in all"
        pace = done - (self._before or 0.0)
        return f"{clock(elapsed * (total - done) / pace)} left" if pace > 0 else "time left unknown"

    def _draw(self) -> Grid:
        grid = Grid.grid(padding=(0, 2))
        for cell, record in sorted(self._running.items(), key=lambda item: _name(item[0])):
            accuracy = self._accuracy.get(cell)
            grid.add_row(
                _name(cell),
                _bar(record.update / cell.plan.updates),
                f"update {record.update:,} / {cell.plan.updates:,}",
                "" if accuracy is None else f"{accuracy:.1f} %",
            )
        total = sum(cell.cost for cell in self._cells)
        ended = f"{len(self._ended)} of {len(self._cells)} cells ended"
        grid.add_row("all", _bar(self._work() / total), ended, self._left())
        return grid


class Counting:
    """Shows how far an instrument is, in a terminal; elsewhere a line when it begins."""

    def __init__(self, name: str, console: Console) -> None:
        self._name, self._console = name, console
        self._done, self._all = 0, 1
        self._live = Live(console=console, get_renderable=self._draw, refresh_per_second=4)

    def __call__(self, done: int, everything: int) -> None:
        """Take in what is done and what there is to do."""
        self._done, self._all = done, everything

    def __enter__(self) -> "Counting":
        if self._console.is_terminal:
            self._live.start()
        else:
            self._console.print(f"measuring: {self._name}", highlight=False)
        return self

    def __exit__(self, *_: object) -> None:
        if self._console.is_terminal:
            self._live.stop()

    def _draw(self) -> Grid:
        grid = Grid.grid(padding=(0, 2))
        grid.add_row(self._name, _bar(self._done / self._all), f"{self._done:,} / {self._all:,}")
        return grid


def print_tables(tables: Sequence[Table], console: Console) -> None:
    """Print a study's tables."""
    for table in tables:
        grid = Grid(title=table.title, title_justify="left", box=None, padding=(0, 2, 0, 0))
        for header in HEADERS:
            grid.add_column(header, justify="left" if not header else "right", no_wrap=True)
        for line in table.lines:
            grid.add_row(*line)
        console.print(grid)
        for note in table.notes:
            console.print(note, style="yellow")


def clock(seconds: float) -> str:
    """Minutes and seconds.

    >>> clock(75.4), clock(3675)
    ('1:15', '1:01:15')
    """
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def _name(cell: Cell) -> str:
    return f"{cell.row} {cell.column} seed {cell.recipe.seed}"


def _bar(fraction: float, width: int = 24) -> Text:
    full = round(width * min(1.0, fraction))
    return Text("━" * full, style="green") + Text("━" * (width - full), style="bright_black")
