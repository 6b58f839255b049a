"""Measure the levers of the training engine on one GPU.

    python benchmarks/levers/measure.py --part pool

Each part checks its results against PyTorch, writes $OUT/PART.json and prints a table last.
"""

import argparse
import sys
from importlib import import_module
from pathlib import Path

PARTS = {"pool": "pool_times", "fold": "fold_times"}

if __name__ == "__main__":
    here = Path(__file__).parent
    sys.path[:0] = [str(here), str(here.parents[1])]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", choices=PARTS, required=True)
    import_module(PARTS[parser.parse_args().part]).main()
