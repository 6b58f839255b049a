"""The levers are scripts of the benchmarks, not part of the package."""

import sys
from importlib.util import find_spec
from pathlib import Path

import torch

if find_spec("triton") is None or torch.cuda.is_available():
    # These tests run kernels in Triton's interpreter, which is not used where there is a GPU.
    kernels = ("batch", "engine", "flat", "joined", "loss", "pool")
    collect_ignore = [f"test_{name}.py" for name in kernels]

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "levers"))
