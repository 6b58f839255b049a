"""Lines on stderr that are no errors."""

import io
import logging
import sys
from threading import Event

import pytest

from ghostbatch.cli import notices
from ghostbatch.cli.notices import log_shown, said_if_slow
from ghostbatch.study import Cost

LOGGER = logging.getLogger("ghostbatch.ops.backends")
LINE = "compiling the CPU kernels; this takes a minute, once"


@pytest.fixture
def log_in_a_command(monkeypatch):
    """Have ``ghostbatch list`` log a line twice, and something below INFO."""

    def command(_words):
        for _ in range(2):
            LOGGER.info(LINE)
        LOGGER.debug("not for users")

    monkeypatch.setattr("ghostbatch.cli.list.command", command)


@pytest.mark.usefixtures("log_in_a_command")
def test_what_the_package_logs_is_one_line_on_stderr(run):
    assert run("list") == (0, "", f"ghostbatch: {LINE}\n")
    assert run("list") == (0, "", f"ghostbatch: {LINE}\n")  # by another handler, not by two


@pytest.mark.usefixtures("log_in_a_command")
def test_other_ranks_do_not_show_what_they_log(run, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    assert run("list") == (0, "", "")


def test_the_users_logging_is_left_as_it_was(capsys):
    logger = logging.getLogger("ghostbatch")
    before = (logger.level, list(logger.handlers))
    with log_shown():
        pass
    LOGGER.info("not shown")
    assert (logger.level, logger.handlers) == before
    assert capsys.readouterr().err == ""


class Terminal(io.StringIO):
    """What sys.stderr is in a terminal; `written` is set when a line has been written."""

    def __init__(self):
        super().__init__()
        self.written = Event()

    def isatty(self):
        return True

    def flush(self):
        self.written.set()


def test_a_slow_start_says_so_in_a_terminal(monkeypatch):
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    monkeypatch.setattr(notices, "SLOW", 0.001)
    with said_if_slow("starting (importing torch)"):
        assert terminal.written.wait(10)
    assert terminal.getvalue() == "ghostbatch: starting (importing torch)\n"


@pytest.mark.parametrize("case", ["a fast start", "no terminal", "another rank"])
def test_nothing_is_said_of(monkeypatch, case):
    terminal = io.StringIO() if case == "no terminal" else Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(notices, "SLOW", 60 if case == "a fast start" else 0)
    monkeypatch.setenv("RANK", "1" if case == "another rank" else "0")
    with said_if_slow("starting (importing torch)"):
        pass
    assert terminal.getvalue() == ""


def test_a_command_is_imported_with_that_notice(run, monkeypatch):
    said = []
    monkeypatch.setattr(
        "ghostbatch.cli.said_if_slow", lambda line: said.append(line) or log_shown()
    )
    run("list")
    assert said == ["starting (importing torch)"]


def test_a_study_says_that_its_workers_start(run, monkeypatch):
    def start_and_stop(_study, _cells, _out, *, make_executor, **_):
        make_executor(0).close()

    monkeypatch.setattr("ghostbatch.cli.study.run_study", start_and_stop)
    monkeypatch.setattr("ghostbatch.cli.study.print_report", lambda *_: None)
    monkeypatch.setattr("ghostbatch.cli.study.measure_cost", lambda cells, *_: Cost(cells))
    for flags, line in (("--jobs 2", "starting 2 workers\n"), ("--seeds 1", "starting 1 worker\n")):
        assert run(*f"study quick --columns SB {flags}".split())[1].endswith(f"images; {line}")
