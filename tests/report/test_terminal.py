"""Bars and tables, in terminals of several kinds and widths."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from ghostbatch import Recipe, Regime
from ghostbatch.recipes import find_recipe
from ghostbatch.report.table import HEADERS, Table, show_rates
from ghostbatch.report.terminal import (
    StudyProgress,
    TrainProgress,
    describe_cost,
    print_tables,
    progress_bars,
)
from ghostbatch.study import Cost, Failure, Row, Study
from ghostbatch.train import Progress, Record, Summary

RECIPE = replace(find_recipe("f1-digits"), regime=Regime(lr=0.05, epochs=4))
CELLS = Study("mine", {"f1-digits": Row({"SB": RECIPE})}, seeds=(0, 1)).cells()
ENDED = Summary(
    status="finished", accuracy=94.2, loss=0.2, updates=500, epochs=4, distance=20, seconds=9
)


def console(**settings):
    """Return the console of commands, with other settings."""
    own = {"markup": False, "highlight": False, "soft_wrap": True, "width": 80}
    return Console(file=io.StringIO(), **{**own, **settings})


def record(update, split="validation"):
    return Record(
        update=update, epoch=1.0, split=split, loss=0.3, accuracy=90.0, lr=0.05, distance=2.0
    )


@pytest.fixture
def clock():
    """A clock that stands still until it is set."""
    return [0.0]


@pytest.fixture
def study(clock):
    """The progress of a study of two cells, piped; the clock above is rich's."""
    bars = progress_bars(console())
    bars.get_time = lambda: clock[0]
    progress = StudyProgress(CELLS, bars)
    return progress, bars.console.file


@pytest.mark.parametrize("width", [10, 80, 200])
@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_table_shows_every_number_whole_in_one_line_at_any_width(width, is_terminal):
    line = ("wresnet16-4 +GBN", "93.1 ± 0.2", "3", "4,096", *["1,234,567.89"] * (len(HEADERS) - 4))
    where = console(width=width, force_terminal=is_terminal)
    print_tables([Table(HEADERS, [line], "row")], where)
    assert where.width == width
    printed = where.file.getvalue().splitlines()[-1]
    assert printed.split() == " ".join(line).split()


def test_a_terminal_that_is_dumb_has_lines_and_no_bars(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    assert progress_bars(console(force_terminal=True)).disable
    monkeypatch.setenv("TERM", "xterm")
    assert not progress_bars(console(force_terminal=True)).disable


def test_a_run_in_a_terminal_has_a_bar_with_images_per_second_and_the_time_left(clock, tmp_path):
    bars = progress_bars(console(force_terminal=True, force_interactive=True))
    bars.get_time = lambda: clock[0]
    progress = TrainProgress("f1-digits", tmp_path, bars)
    now = Progress(
        plan=find_recipe("f1-digits").plan(4000),
        device="cpu",
        threads=1,
        engine="eager",
        update=100,
        end=500,
    )
    assert not progress.started
    try:
        for update, clock[0] in ((100, 0.0), (200, 10.0), (300, 20.0)):
            progress._next = 0.0
            progress.on_progress(replace(now, update=update))
        progress._next = 0.0
        progress.on_progress(replace(now, update=300))  # the rate is that of the samples before
        (task,) = bars.tasks
        assert progress.started
        assert (task.completed, task.total, task.time_remaining) == (300, 500, 20)
        assert task.fields == {"steps": "update 300 / 500", "note": "320 images/s"}
    finally:
        bars.stop()
    shown = bars.console.file.getvalue()
    assert "continues after update 100" in shown
    assert "320 images/s" in shown


def test_the_time_left_of_a_study_is_the_measured_work_that_is_left_at_the_pace_so_far(
    study, clock
):
    """The second cell is three times as long as the first, which took 20 s, not 10."""
    progress, shown = study
    first, second = CELLS
    progress.start(Cost(CELLS, {first: 10.0, second: 30.0}), workers=1)
    assert "about 40 seconds on this machine; starting 1 worker\n" in shown.getvalue()
    for update in (0, 1, 500):
        clock[0] = update * 20 / 500
        progress.on_event(first, record(update))
    progress.on_event(first, ENDED)
    assert shown.getvalue().endswith("[1/2] f1-digits SB seed 0: 94.2 %, about 60 seconds left\n")
    progress.on_event(second, record(0))
    clock[0] = 80.0
    progress.on_event(second, record(500))
    progress.on_event(second, ENDED)
    assert shown.getvalue().endswith("[2/2] f1-digits SB seed 1: 94.2 %, about 80 seconds in all\n")


def test_what_earlier_commands_did_does_not_count_as_the_pace_of_this_one(study, clock):
    """The cell continues at update 400 of 500: a fifth of its 50 s is left."""
    progress, shown = study
    ended, half_done = CELLS
    progress.start(Cost([half_done], {half_done: 50.0}), workers=1)
    assert shown.getvalue().startswith("1 of 2 runs had ended already\n1 run to do: ")
    progress.on_event(ended, ENDED)
    clock[0] = 5.0
    progress.on_event(half_done, record(400))
    for update in (425, 450):
        clock[0] += 2.5
        progress.on_event(half_done, record(update))
    task = progress._bars.tasks[0]
    assert (task.total, task.completed) == (pytest.approx(10), pytest.approx(5))
    assert task.time_remaining == pytest.approx(5, abs=1)
    progress.on_event(half_done, ENDED)
    assert shown.getvalue().count("94.2 %") == 1
    assert "[2/2] f1-digits SB seed 1: 94.2 %, " in shown.getvalue()


def test_a_cell_that_fails_early_takes_its_work_from_what_is_left(study, clock):
    progress, shown = study
    first, second = CELLS
    progress.start(Cost(CELLS, {first: 100.0, second: 10.0}), workers=2)
    progress.on_event(second, record(0))
    clock[0] = 1.0
    progress.on_event(second, record(50))
    clock[0] = 5.0
    progress.on_event(second, record(250))
    progress.on_event(first, Failure(first.name, "no memory"))
    assert shown.getvalue().splitlines()[-1].startswith("[1/2] f1-digits SB seed 0: failed, ")
    assert progress._bars.tasks[0].total == 10


def test_a_cost_that_was_not_measured_has_no_time():
    line = "2 runs to do: 1,000 updates, 32,000 images"
    assert describe_cost(Cost(CELLS)) == line
    assert (
        describe_cost(Cost(CELLS, {CELLS[0]: 7200.0})) == f"{line}, about 2 hours on this machine"
    )


def test_rates_are_shown_with_the_updates_at_which_they_begin_and_how_they_fall():
    regime = Regime(lr=0.1, epochs=4, drops=((2, 0.01),), warmup=1)
    recipe = Recipe(model="f1", data="digits", batch=100, base_batch=100, regime=regime)
    assert show_rates(recipe.plan(1000)) == "0.1 (10), 0.01 (20)"
    cosine = replace(recipe, regime=Regime(lr=0.1, epochs=4, schedule="cosine"))
    assert show_rates(cosine.plan(1000)) == "0.1 (0), cosine to 0 (40)"
