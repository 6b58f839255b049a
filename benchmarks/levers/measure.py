"""Measure the levers of the training engine on one GPU.

    python benchmarks/levers/measure.py --part pool
    python benchmarks/levers/measure.py --part engine --cases resnet44:4096,vgg:4096

Each part checks its results against PyTorch and prints a table last.
"""

import argparse
import sys
from importlib import import_module
from pathlib import Path

PARTS = {
    "pool": "pool_times",
    "fold": "fold_times",
    "norm": "norm_times",
    "engine": "engine_times",
    "peers": "peer_times",
    "side-by-side": "side_by_side_times",
}

if __name__ == "__main__":
    here = Path(__file__).parent
    sys.path[:0] = [str(here), str(here.parents[1])]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", choices=PARTS, required=True)
    parser.add_argument("--cases", help="NETWORK:BATCH,... for engine and peers")
    parser.add_argument("--variants", help="NAME,... for engine; all if left out")
    parser.add_argument("--json", type=Path, dest="path", help="write the figures here too")
    options = vars(parser.parse_args())
    part = import_module(PARTS[options.pop("part")])
    part.main(**{name: value for name, value in options.items() if value is not None})
