"""Fixtures shared by all tests: a short recipe, and the outcome of a run for comparison."""

import json
import os
import signal
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch

from ghostbatch import Recipe, Regime
from ghostbatch.ops.backends import select

SUPPORT = Path(__file__).with_name("support")
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(SUPPORT), *filter(None, [os.environ.get("PYTHONPATH")])]
)

if not torch.cuda.is_available():
    # Triton then runs kernels in its interpreter; this must be set before Triton is imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")

# A shell starts background jobs with Ctrl-C ignored, and nohup ignores the end of the terminal.
# Processes that tests start would inherit that.
for number, usual in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGHUP, signal.SIG_DFL),
):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, usual)


def pytest_report_header() -> str:
    """Return the versions of the libraries on which results may depend."""
    versions = {each.name: each.version for each in metadata.distributions()}
    names = ("torch", "torchvision", "triton", "timm", "numpy")
    return ", ".join(f"{name} {versions[name]}" for name in names if name in versions)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests of real data unless GHOSTBATCH_DATA is set."""
    if item.get_closest_marker("real_data") and not os.environ.get("GHOSTBATCH_DATA"):
        pytest.skip("GHOSTBATCH_DATA is not set")


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Use one thread: tests run in parallel processes."""
    torch.set_num_threads(1)


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the Triton kernels on CPU tensors; giving them up would be an error."""
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("with a GPU the kernels are not interpreted")
    monkeypatch.setenv(select.SWITCH, "interpret")
    monkeypatch.setattr(select, "_broken", set())


@pytest.fixture
def tiny() -> Recipe:
    """Return a recipe on the embedded digits: 16 updates, with a drop in the middle."""
    return Recipe(
        model="python:small_networks:narrow",
        data="digits",
        batch=64,
        base_batch=32,
        regime=Regime(lr=0.05, epochs=0.256, drops=((0.128, 0.005),)),
        lr_rule="sqrt",
        ghost=16,
    )


@pytest.fixture
def outcome() -> Callable[[Path], dict[str, Any]]:
    """Return a function that reads everything that repeating or resuming must not change."""

    def read(folder: Path) -> dict[str, Any]:
        summary = json.loads((folder / "summary.json").read_text())
        del summary["seconds"], summary["checksum"]
        state = torch.load(folder / "checkpoint.pt", weights_only=True)["state"]
        return {
            "summary": summary,
            "metrics": (folder / "metrics.jsonl").read_text(),
            "weights": {name: tensor.tolist() for name, tensor in state["model"].items()},
        }

    return read
