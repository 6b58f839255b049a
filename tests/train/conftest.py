"""Processes to be killed: ghostbatch as a command, alone and under torchrun."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from image_folder import write_images

from ghostbatch import Recipe, Regime

SMALL = (
    *("train", "f1-digits", "--model", "python:small_networks:dropping"),
    *("--device", "cpu", "--threads", "1"),
    *("--batch", "128", "--ghost", "16", "--regime.drops", ",", "--augment"),
    *("--evaluations", "2"),
)
"""A run of moments, with dropout, crops and clipping."""

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


@dataclass
class Child:
    """A ghostbatch that runs, or has run."""

    pid: int
    stdout: Path
    stderr: Path
    ask: Callable[..., Any]
    code: int | None = field(default=None, init=False)

    def kill(self, how: signal.Signals = signal.SIGKILL) -> None:
        os.kill(self.pid, how)

    def wait(self, seconds: float = 60) -> int | None:
        self.code = self.ask("wait", self.pid, seconds)
        return self.code

    @property
    def said(self) -> list[str]:
        """Lines on stderr."""
        return self.stderr.read_text().splitlines()

    def until(self, condition: Callable[[], bool], seconds: float = 20) -> None:
        """Wait for something that this process does."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, self.said
            time.sleep(0.002)


@pytest.fixture(scope="session")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Child]]:
    """Start ``ghostbatch ARGV`` in a process that may have one of `faults` injected."""
    script = Path(__file__).with_name("starter.py")
    folder = tmp_path_factory.mktemp("said")
    with subprocess.Popen(
        [sys.executable, script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
        env=ENVIRONMENT,
    ) as starter:

        def ask(name: str, *arguments: Any) -> Any:
            starter.stdin.write(json.dumps([name, arguments]) + "\n")
            return json.loads(starter.stdout.readline())

        count = 0

        def start(*argv: Any, fault: str | None = None, **options: Any) -> Child:
            nonlocal count
            count += 1
            out, err = (folder / f"{count}.{name}" for name in ("out", "err"))
            pid = ask("start", [str(word) for word in argv], str(out), str(err), fault, options)
            return Child(pid, out, err, ask)

        yield start
        starter.stdin.close()
        try:
            starter.wait(20)
        except subprocess.TimeoutExpired:  # another process still has the pipe
            starter.kill()


@pytest.fixture(scope="session")
def small() -> tuple[str, ...]:
    """The command for a run of 31 updates."""
    return (*SMALL, "--regime.epochs", "1")


@pytest.fixture(scope="session")
def whole(
    launch: Callable[..., Child], small: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """That run without any interruption."""
    out = tmp_path_factory.mktemp("whole") / "run"
    child = launch(*small, "--out", out)
    assert child.wait() == 0, child.said
    return out


@pytest.fixture
def slowly(tmp_path: Path) -> Callable[[float], tuple[dict[str, Any], Callable[[], int]]]:
    """The fault that slows updates down, and a function that returns the number of updates done."""
    log = tmp_path / "updates"

    def make(seconds: float) -> tuple[dict[str, Any], Callable[[], int]]:
        fault = {"fault": "slow_updates", "seconds": seconds, "log": str(log)}
        return fault, lambda: len(log.read_text().split()) if log.exists() else 0

    return make


@pytest.fixture
def updates_of() -> Callable[[Path], int]:
    """The updates that a run has written down so far."""

    def read(folder: Path) -> int:
        path = folder / "metrics.jsonl"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        return json.loads(lines[-1])["update"] if lines else -1

    return read


@pytest.fixture
def folder_recipe(tmp_path: Path) -> Recipe:
    """Four updates on a folder of 24 tiny images."""
    return Recipe(
        model="python:small_networks:narrow",
        data=f"folder:{write_images(tmp_path / 'images')}",
        image_size=9,
        batch=8,
        base_batch=8,
        regime=Regime(lr=0.01, epochs=Fraction(4, 3)),
    )
