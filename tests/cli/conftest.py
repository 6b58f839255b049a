"""A command that runs in this process."""

import sys

import pytest

from ghostbatch import cli


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """Run a command in an empty folder; return its exit code and what it printed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GHOSTBATCH_DATA", raising=False)

    def call(*words):
        monkeypatch.setattr(sys, "argv", ["ghostbatch", *words])
        code = 0
        try:
            cli.main()
        except SystemExit as stop:
            code = stop.code or 0
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return call
