"""The command line under torchrun, with a small network and updates that take a while.

    torchrun --nproc-per-node=2 tests/train/elastic.py FOLDER SECONDS COMMAND ...

Each rank leaves its process id in FOLDER. Several commands, with --then between them, are run one
after the other, and every rank says how each ended.
"""

import os
import sys
import time
from itertools import groupby
from pathlib import Path

import ranks
import torch
from torch import nn

from ghostbatch import cli
from ghostbatch.nn import MODELS
from ghostbatch.train.session import Session


class Bad(nn.Module):
    """Spoils one value of what the second rank trains on."""

    def forward(self, x):
        if not self.training or os.environ["RANK"] != "1":
            return x
        return torch.cat([x[:1] * torch.inf, x[1:]])


def one_bad_rank(*sizes, **more):
    """The small network with a bad layer after its first three."""
    return ranks.dropping(*sizes, **more).insert(3, Bad())


MODELS["one-bad-rank"] = one_bad_rank


def main(folder, seconds, words):
    rank = os.environ["RANK"]
    (Path(folder) / f"rank-{rank}").write_text(str(os.getpid()))
    step = Session.step

    def slow(self, **options):
        time.sleep(float(seconds))
        return step(self, **options)

    Session.step = slow
    commands = [list(part) for split, part in groupby(words, "--then".__eq__) if not split]
    for command in commands:
        sys.argv = ["ghostbatch", *command]
        if len(commands) == 1:
            cli.main()
            return
        try:
            cli.main()
            code = 0
        except SystemExit as stop:
            code = stop.code
        sys.stderr.write(f"rank {rank}: exit {code}\n")  # in one piece, unlike print
        sys.stderr.flush()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
