"""What the terminal shows: the progress of a study, and its tables."""

import time
from collections.abc import Sequence
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.table import Table as Grid
from rich.text import Text

from ghostbatch.report.table import HEADERS, Table
from ghostbatch.study import Cell, Event
from ghostbatch.train import Record, Summary


class Panel:
    """Something that a terminal shows and redraws while a command works."""

    def __init__(self, console: Console, visible: bool = True) -> None:
        self._console = console
        self._visible = visible and console.is_terminal
        self._live: Live | None = None

    def __enter__(self) -> Self:
        if self._visible:
            self._live = Live(
                console=self._console, get_renderable=self._draw, refresh_per_second=4
            )
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def _draw(self) -> Grid:
        raise NotImplementedError


class StudyProgress(Panel):
    """Shows the runs of a study: in a terminal those at work, elsewhere a line for each that ends.

    Pass `on_event` to `run_study`.
    """

    def __init__(self, cells: Sequence[Cell], console: Console) -> None:
        super().__init__(console, visible=bool(cells))
        self._cells = list(cells)
        self._ended: dict[Cell, Summary] = {}
        self._running: dict[Cell, Record] = {}
        self._accuracy: dict[Cell, float] = {}
        self._before: float | None = None
        self._began = time.monotonic()

    def on_event(self, cell: Cell, event: Event) -> None:
        """Note a record or the summary of a run."""
        if isinstance(event, Summary):
            self._running.pop(cell, None)
            self._ended[cell] = event
            if not self._console.is_terminal:
                count = f"[{len(self._ended)}/{len(self._cells)}]"
                accuracy = "diverged" if event.status == "diverged" else f"{event.accuracy:.1f} %"
                self._console.print(
                    f"{count} {cell.name}: {accuracy}, {self._left()}", highlight=False
                )
            return
        if self._before is None:
            self._before = self._work()  # done by an earlier command
            self._began = time.monotonic()
        self._running[cell] = event
        if event.split == "validation":
            self._accuracy[cell] = event.accuracy

    def _work(self) -> float:
        """Return the work done so far, in samples."""
        running = (c.cost * r.update / c.plan.updates for c, r in list(self._running.items()))
        return sum(cell.cost for cell in self._ended) + sum(running)

    def _left(self) -> str:
        """Return the time left as text, at the pace of this command."""
        total = sum(cell.cost for cell in self._cells)
        done, elapsed = self._work(), time.monotonic() - self._began
        if done >= total:
            return f"{clock(elapsed)} in all"
        pace = done - (self._before or 0.0)
        return f"{clock(elapsed * (total - done) / pace)} left" if pace > 0 else "time left unknown"

    def _draw(self) -> Grid:
        grid = Grid.grid(padding=(0, 2))
        for cell, record in sorted(self._running.items(), key=lambda item: item[0].name):
            accuracy = self._accuracy.get(cell)
            grid.add_row(
                cell.name,
                _bar(record.update / cell.plan.updates),
                f"update {record.update:,} / {cell.plan.updates:,}",
                "" if accuracy is None else f"{accuracy:.1f} %",
            )
        total = sum(cell.cost for cell in self._cells)
        ended = f"{len(self._ended)} of {len(self._cells)} cells ended"
        grid.add_row("all", _bar(self._work() / total), ended, self._left())
        return grid


class InstrumentProgress(Panel):
    """Shows how far an instrument is: a bar in a terminal, elsewhere a line when it begins.

    Pass it to `measure` as ``on_progress``.
    """

    def __init__(self, name: str, console: Console) -> None:
        super().__init__(console)
        self._name, self._done, self._total = name, 0, 1

    def __enter__(self) -> Self:
        if not self._console.is_terminal:
            self._console.print(f"measuring: {self._name}", highlight=False)
        return super().__enter__()

    def __call__(self, done: int, total: int) -> None:
        """Note the number of steps done and the number of all steps."""
        self._done, self._total = done, total

    def _draw(self) -> Grid:
        grid = Grid.grid(padding=(0, 2))
        bar = _bar(self._done / self._total)
        grid.add_row(self._name, bar, f"{self._done:,} / {self._total:,}")
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
    """Return a time as minutes and seconds, with hours if there are any.

    >>> clock(75.4), clock(3675)
    ('1:15', '1:01:15')
    """
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def _bar(fraction: float, width: int = 24) -> Text:
    full = round(width * min(1.0, fraction))
    return Text("━" * full, style="green") + Text("━" * (width - full), style="bright_black")
