"""What the terminal shows: the progress of a study, and its tables."""

from collections.abc import Callable, Sequence
from datetime import timedelta
from math import inf

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table as Grid

from ghostbatch.report.table import HEADERS, Table
from ghostbatch.study import Cell, Event, Failure
from ghostbatch.train import Record, Summary


def plain_console(quiet: bool = False) -> Console:
    """Return a console that prints text as it is: names of folders may look like markup."""
    return Console(quiet=quiet, markup=False, emoji=False, highlight=False)


def progress_bars(console: Console) -> Progress:
    """Return bars, each with two texts and the time left; they are shown in a terminal only."""
    name, steps, note = (
        TextColumn(f"{{task.{text}}}", markup=False)
        for text in ("description", "fields[steps]", "fields[note]")
    )
    return Progress(
        *(name, BarColumn(24), steps, note),
        TimeRemainingColumn(elapsed_when_finished=True),
        console=console,
        refresh_per_second=4,
        speed_estimate_period=inf,
        disable=not console.is_terminal,
    )


class StudyProgress:
    """Shows a study's progress: a bar per running cell in a terminal, else a line per ended cell.

    Pass `on_event` to `run_study`.
    """

    def __init__(self, cells: Sequence[Cell], bars: Progress) -> None:
        self._cells, self._bars = cells, bars
        total = sum(cell.cost for cell in cells)
        self._all = bars.add_task("all", total=total, visible=bool(cells), steps="", note="")
        self._running: dict[Cell, TaskID] = {}
        self._work: dict[Cell, float] = {}
        self._ended = 0

    def start(self, jobs: int, runs: int) -> None:
        """Show that workers are being started, which takes seconds, if there are runs to do."""
        workers = min(jobs, runs)
        line = f"starting {workers} worker{'' if workers == 1 else 's'}"
        self._bars.update(self._all, steps=line if runs else "")
        if runs and self._bars.disable:
            self._bars.console.print(line, highlight=False)

    def on_event(self, cell: Cell, event: Event | Failure) -> None:
        """Show a record, the summary or the failure of a run."""
        if isinstance(event, Record):
            updates = cell.plan.updates
            if cell not in self._running:
                self._running[cell] = self._bars.add_task(cell.name, steps="", note="")
            steps = f"update {event.update:,} / {updates:,}"
            task = self._running[cell]
            self._bars.update(task, completed=event.update, total=updates, steps=steps)
            if event.split == "validation":
                self._bars.update(task, note=f"{event.accuracy:.1f} %")
            self._note_work(cell, cell.cost * event.update / updates)
            return
        if cell in self._running:
            self._bars.remove_task(self._running.pop(cell))
        elif isinstance(event, Summary):
            # It ended in an earlier command, which says nothing about the pace of this one.
            self._bars.reset(self._all)
        self._ended += 1
        self._note_work(cell, cell.cost)
        if self._bars.disable:
            count = f"[{self._ended}/{len(self._cells)}]"
            line = f"{count} {cell.name}: {_outcome(event)}, {self._time()}"
            self._bars.console.print(line)

    def _note_work(self, cell: Cell, samples: float) -> None:
        self._work[cell] = samples
        ended = f"{self._ended} of {len(self._cells)} cells ended"
        self._bars.update(self._all, completed=sum(self._work.values()), steps=ended)

    def _time(self) -> str:
        """Return the time left as text, at the pace of this command."""
        task = self._bars.tasks[0]
        if task.finished_time is not None:
            return f"{timedelta(seconds=round(task.finished_time))} in all"
        left = task.time_remaining
        return "time left unknown" if left is None else f"{timedelta(seconds=round(left))} left"


def _outcome(event: Summary | Failure) -> str:
    """Return how a run ended, in a word."""
    if isinstance(event, Failure):
        return "failed"
    return "diverged" if event.status == "diverged" else f"{event.accuracy:.1f} %"


def instrument_progress(name: str, bars: Progress) -> Callable[[int, int], None]:
    """Show an instrument: in a terminal a bar, elsewhere a line; return `measure`'s callback."""
    if bars.disable:
        bars.console.print(f"measuring: {name}")
    task = bars.add_task(name, steps="", note="")

    def on_progress(done: int, total: int) -> None:
        bars.update(task, completed=done, total=total, steps=f"{done:,} / {total:,}")

    return on_progress


def print_tables(tables: Sequence[Table], console: Console) -> None:
    """Print a study's tables."""
    for table in tables:
        grid = Grid(title=table.title, title_justify="left", box=None, padding=(0, 1, 0, 0))
        for header in HEADERS:
            grid.add_column(header, justify="left" if not header else "right", no_wrap=True)
        for line in table.lines:
            grid.add_row(*line)
        console.print(grid)
        for note in table.notes:
            console.print(note, style="yellow", markup=False, highlight=False, soft_wrap=True)
