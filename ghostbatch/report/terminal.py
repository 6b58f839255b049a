"""What the terminal shows: the progress of a run or a study, and tables.

Where there is no terminal, or only a dumb one, there are no bars and no control characters.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from math import inf
from pathlib import Path
from typing import ClassVar

from rich.console import Console, JustifyMethod
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table as Grid

from ghostbatch.report.table import Table, show_batches, show_rates
from ghostbatch.study import Cell, Cost, Event, Failure
from ghostbatch.train import Progress as RunProgress
from ghostbatch.train import Record, Summary

WIDE = 10_000
"""Columns of a console that never has to cut or wrap a table."""

REFRESH = 0.25
"""Seconds between two changes of a run's bar."""

UNITS = (("day", 86_400), ("hour", 3600), ("minute", 60), ("second", 1))


def plain_console(quiet: bool = False) -> Console:
    """Return a console that prints text as it is: names of folders may look like markup."""
    return Console(quiet=quiet, markup=False, emoji=False, highlight=False, soft_wrap=True)


def progress_bars(console: Console) -> Progress:
    """Return bars, each with two texts and the time left; they are shown in a terminal only."""
    name, steps, note = (
        TextColumn(f"{{task.{text}}}", markup=False)
        for text in ("description", "fields[steps]", "fields[note]")
    )
    return Progress(
        *(name, BarColumn(None), steps, note),
        TimeRemainingColumn(elapsed_when_finished=True),
        console=console,
        refresh_per_second=4,
        speed_estimate_period=inf,
        disable=not console.is_interactive,
    )


def about(seconds: float) -> str:
    """Return a time as people say it.

    >>> about(0.4), about(93), about(8_000), about(29 * 3600), about(1e6)
    ('about 1 second', 'about 95 seconds', 'about 2 hours', 'about 30 hours', 'about 10 days')
    """
    unit, size = next((each for each in UNITS if seconds >= 2 * each[1]), UNITS[-1])
    number = max(1, round(seconds / size))
    if number >= 10:
        number = 5 * round(seconds / size / 5)
    return f"about {number:,} {unit}{'' if number == 1 else 's'}"


class TrainProgress:
    """Shows a run: what it will do, a line for each evaluation, and a bar in a terminal.

    Pass `on_progress` and `on_record` to `train`, and call ``bars.stop`` after it.
    """

    COLUMNS: ClassVar = {
        **{"update": 8, "epoch": 8, "lr": 9, "training loss": 15},
        **{"validation loss": 17, "accuracy %": 12, "distance": 10},
    }
    """Headers of the lines, and their widths."""

    def __init__(self, name: str, out: Path, bars: Progress) -> None:
        self._name, self._out, self._bars = name, out, bars
        self._task: TaskID | None = None
        self._next = 0.0
        self._training_loss = "-"

    @property
    def started(self) -> bool:
        """Whether the run has begun or continued; if not, it had ended already."""
        return self._task is not None

    def on_progress(self, now: RunProgress) -> None:
        """Say what the run will do, when it begins; then show how far it is."""
        if self._task is None:
            print_fields(self._banner(now), self._bars.console)
            self._print_line(list(self.COLUMNS))
            self._bars.start()
            self._task = self._bars.add_task(
                self._name, total=now.end, completed=now.update, steps="", note=""
            )
        if now.update < now.end and time.monotonic() < self._next:
            return
        self._next = time.monotonic() + REFRESH
        batch = now.plan.recipe.batch * len(now.plan.stream(now.update))
        images = (self._bars.tasks[0].speed or 0.0) * batch
        self._bars.update(
            self._task,
            total=now.end,
            completed=now.update,
            steps=f"update {now.update:,} / {now.end:,}",
            note=f"{images:,.0f} images/s" if images else "",
        )

    def on_record(self, record: Record) -> None:
        """Print a line for an evaluation, with the last training loss."""
        if record.split == "train":
            self._training_loss = f"{record.loss:.4f}"
            return
        when = (f"{record.update:,}", f"{record.epoch:.4g}", f"{record.lr:.3g}")
        found = (f"{record.loss:.4f}", f"{record.accuracy:.2f}", f"{record.distance:.2f}")
        self._print_line((*when, self._training_loss, *found))

    def _print_line(self, texts: Sequence[str]) -> None:
        widths = self.COLUMNS.values()
        cells = (f"{text:>{width}}" for text, width in zip(texts, widths, strict=True))
        self._bars.console.print("".join(cells))

    def _banner(self, now: RunProgress) -> dict[str, str]:
        plan, recipe = now.plan, now.plan.recipe
        threads = f"{now.threads} thread{'' if now.threads == 1 else 's'}"
        most = "at most " if recipe.hold == "distance" else ""
        per = f" per {recipe.batch:,}" if recipe.grow else ""
        norm = f"{plan.ghosts:,} ghosts of {recipe.ghost:,}{per}" if recipe.ghost else "no ghosts"
        held = f"{recipe.holdout:,} held-out training images"
        evaluated = held if recipe.holdout else "the whole test set"
        begins = f"continues after update {now.update:,}" if now.update else "a new run"
        return {
            "recipe": f"{self._name}: {recipe.model}, {recipe.precision}, seed {recipe.seed}",
            "data": f"{recipe.data}: {plan.samples:,} training images"
            + (", augmented" if recipe.augment else ""),
            "device": f"{now.device}, {threads}, engine: {now.engine}",
            "updates": f"{most}{now.end:,} of {show_batches(plan)} images each, {norm}; "
            f"{plan.epoch(now.end):.4g} epochs",
            "rates": f"{show_rates(plan)}: learning rate (from update)",
            "folder": f"{self._out}: {begins}",
            "losses": f"training: mean since the record before; validation: {evaluated}",
        }


class StudyProgress:
    """Shows a study's progress: a bar per running cell in a terminal, else a line per ended cell.

    Call `start`, and pass `on_event` to `run_study`. Work is counted in measured seconds, so that
    cells of different networks add up.
    """

    def __init__(self, cells: Sequence[Cell], bars: Progress) -> None:
        self._cells, self._bars = cells, bars
        self._all = bars.add_task(
            "all", total=None, visible=bool(cells), steps="timing some updates", note=""
        )
        self._running: dict[Cell, TaskID] = {}
        self._seconds: dict[Cell, float] = {}
        self._to_do: dict[Cell, float] = {}
        self._done: dict[Cell, float] = {}
        """Seconds of work by cell: of all its updates, of this command, and done by it so far."""
        self._ended = 0

    def start(self, cost: Cost, workers: int) -> None:
        """Say what is to be done; ``cost`` is that of the cells that have not ended."""
        self._seconds = {cell: cost.seconds.get(cell, 0.0) for cell in cost.cells}
        self._to_do = dict(self._seconds)
        self._ended = len(self._cells) - len(cost.cells)
        console = self._bars.console
        if self._ended:
            console.print(f"{self._ended:,} of {len(self._cells):,} runs had ended already")
        if cost.cells:
            line = f"starting {workers} worker{'' if workers == 1 else 's'}"
            console.print(f"{describe_cost(cost)}; {line}")
        self._show_work()

    def on_event(self, cell: Cell, event: Event | Failure) -> None:
        """Show a record, the summary or the failure of a run; skip one that had ended already."""
        if isinstance(event, Record):
            self._show_record(cell, event)
        elif cell in self._to_do or isinstance(event, Failure):
            self._show_end(cell, event)

    def _show_record(self, cell: Cell, record: Record) -> None:
        updates = cell.plan.updates
        left = self._seconds.get(cell, 0.0) * (1 - record.update / updates)
        if cell not in self._running:
            self._running[cell] = self._bars.add_task(cell.name, total=updates, steps="", note="")
            self._to_do[cell] = left
        self._done[cell] = self._to_do[cell] - left
        steps = f"update {record.update:,} / {updates:,}"
        self._bars.update(self._running[cell], completed=record.update, steps=steps)
        if record.split == "validation":
            self._bars.update(self._running[cell], note=f"{record.accuracy:.1f} %")
        self._show_work()

    def _show_end(self, cell: Cell, event: Summary | Failure) -> None:
        if cell in self._running:
            self._bars.remove_task(self._running.pop(cell))
        self._ended += 1
        self._to_do[cell] = self._done.get(cell, 0.0)  # it may have ended early
        self._show_work()
        if self._bars.disable:
            count = f"[{self._ended:>{len(str(len(self._cells)))}}/{len(self._cells)}]"
            width = max(len(each.name) for each in self._cells) + 1
            line = f"{count} {f'{cell.name}:':<{width}} {_outcome(event)}, {self._time()}"
            self._bars.console.print(line)

    def _show_work(self) -> None:
        self._bars.update(
            self._all,
            total=sum(self._to_do.values()),
            completed=sum(self._done.values()),
            steps=f"{self._ended:,} of {len(self._cells):,} runs ended",
        )

    def _time(self) -> str:
        """Return the time left as text, at the pace of this command."""
        task = self._bars.tasks[0]
        if task.finished_time is not None:
            return f"{about(task.finished_time)} in all"
        left = task.time_remaining
        return "time left unknown" if left is None else f"{about(left)} left"


def describe_cost(cost: Cost) -> str:
    """Return what cells cost, in words."""
    if not (count := len(cost.cells)):
        return "no runs to do"
    here = f", {about(cost.seconds_in_all)} on this machine" if cost.seconds else ""
    return (
        f"{count:,} run{'' if count == 1 else 's'} to do: {cost.updates:,} updates, "
        f"{cost.images:,} images{here}"
    )


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
    """Print a study's tables with their notes."""
    for table in tables:
        print_table(table, console, justify="right")
        for note in table.notes:
            console.print(note, style="yellow", markup=False, highlight=False, soft_wrap=True)


def print_table(
    table: Table, console: Console, gap: int = 1, justify: JustifyMethod = "left"
) -> None:
    """Print a table, ``gap`` spaces between columns; the first column is always on the left.

    The table has its own width: no number is cut or wrapped, however narrow the terminal.
    """
    grid = Grid(title=table.title, title_justify="left", box=None, padding=(0, gap, 0, 0))
    for header in table.headers:
        grid.add_column(header, justify=justify if header else "left")
    for line in table.lines:
        grid.add_row(*line)
    width, console.width = console.width, WIDE
    console.print(grid)
    console.width = width


def print_fields(fields: Mapping[str, str], console: Console) -> None:
    """Print names and values, one aligned line each."""
    width = max(map(len, fields))
    for name, value in fields.items():
        console.print(f"{name:<{width}}  {value}", soft_wrap=True)
