"""What the tests share: a recipe that runs in a moment, and how to compare two runs."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ghostbatch import Recipe, Regime

SUPPORT = Path(__file__).with_name("support")
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(SUPPORT), *filter(None, [os.environ.get("PYTHONPATH")])]
)

if not torch.cuda.is_available():
    # Triton's kernels then run in its interpreter; it must know before anyone imports it.
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Tests of real data run where there are some."""
    if item.get_closest_marker("real_data") and not os.environ.get("GHOSTBATCH_DATA"):
        pytest.skip("GHOSTBATCH_DATA names no folder of data sets")


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Tests run side by side; more threads than cores would only slow them down."""
    torch.set_num_threads(1)


@pytest.fixture
def tiny() -> Recipe:
    """F1 on the embedded digits for 16 updates, with a drop in the middle."""
    return Recipe(
        model="f1",
        data="digits",
        batch=64,
        base_batch=32,
        regime=Regime(lr=0.05, epochs=0.256, drops=((0.128, 0.005),)),
        lr_rule="sqrt",
        ghost=16,
    )


@pytest.fixture
def outcome() -> Callable[[Path], dict[str, Any]]:
    """All that must not change when a run is repeated or resumed."""

    def read(folder: Path) -> dict[str, Any]:
        summary = json.loads((folder / "summary.json").read_text())
        del summary["seconds"]
        state = torch.load(folder / "checkpoint.pt", weights_only=True)["state"]
        return {
            "summary": summary,
            "metrics": (folder / "metrics.jsonl").read_text(),
            "weights": {name: tensor.tolist() for name, tensor in state["model"].items()},
        }

    return read
