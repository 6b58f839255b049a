"""Tests on several ranks: torchrun runs the cases of a script once, and each case is one test.

A script registers its cases and runs them where torchrun starts it:

    case = Cases()

    @case
    def a_claim(): ...

    if __name__ == "__main__":
        case.run()

and the test beside it asks for each of them:

    SCRIPT = Path(__file__).with_name("script.py")
    on_ranks = ranks_fixture(SCRIPT, 2, 4)

    @pytest.mark.parametrize("name", case_names(SCRIPT))
    def test_ranks_agree(on_ranks, name):
        on_ranks(name)
"""

import gc
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist


def torchrun(
    ranks: int, script: Path, *arguments: object, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run a script in as many processes as there are ranks, and wait for them."""
    return subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *(f"--nproc-per-node={ranks}", script, *map(str, arguments)),
        ],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        **options,
    )


def load(script: Path) -> ModuleType:
    """Import a script by its path."""
    spec = importlib.util.spec_from_file_location(f"{script.parent.name}_{script.stem}", script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Cases:
    """The cases of a script, in order; a decorator registers each by its name."""

    def __init__(self) -> None:
        self.functions: dict[str, Callable[[], None]] = {}

    def __call__(self, function: Callable[[], None]) -> Callable[[], None]:
        """Register a case."""
        self.functions[function.__name__] = function
        return function

    def run(self) -> None:
        """Run every case on this rank; rank 0 prints the name of each that held on all of them."""
        torch.set_num_threads(1)
        dist.init_process_group("gloo", timeout=timedelta(minutes=2))
        for name, function in self.functions.items():
            torch.manual_seed(0)
            torch._dynamo.reset()
            function()
            dist.barrier()
            if dist.get_rank() == 0:
                print("held:", name, flush=True)
        gc.collect()  # models under DDP keep the process group alive in reference cycles
        dist.destroy_process_group()


def count_calls(owner: Any, name: str) -> Callable[[], int]:
    """Count the calls of a function of ``owner``; return a function that stops and returns them."""
    original, calls = getattr(owner, name), []

    def counted(*arguments: Any, **options: Any) -> Any:
        calls.append(name)
        return original(*arguments, **options)

    def stop() -> int:
        setattr(owner, name, original)
        return len(calls)

    setattr(owner, name, counted)
    return stop


def case_names(script: Path) -> list[str]:
    """Return the names of a script's cases, for parametrization."""
    return list(load(script).case.functions)


def ranks_fixture(script: Path, *ranks: int) -> Any:
    """Return a fixture: a function that fails unless the case of a name held on all ranks."""

    @pytest.fixture(scope="module", params=ranks, ids=[f"{n} ranks" for n in ranks])
    def on_ranks(request: pytest.FixtureRequest) -> Callable[[str], None]:
        done = torchrun(request.param, script)
        held = [line.removeprefix("held: ") for line in done.stdout.splitlines()]

        def check(name: str) -> None:
            assert name in held, f"stopped after {held[-1:]}\n{done.stderr[-3000:]}"

        return check

    return on_ranks
