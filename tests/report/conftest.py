"""Bundling the page's script takes seconds, so only the tests in a browser have a real one."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest


@pytest.fixture(autouse=True)
def no_script(monkeypatch):
    """Leave the script of the page empty."""
    script = SimpleNamespace(text=lambda: "")
    monkeypatch.setattr("ghostbatch.report.page.VegaScript", lambda: nullcontext(script))
