"""The levers are scripts of the benchmarks, not part of the package."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "levers"))
