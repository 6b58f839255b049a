"""The command line under torchrun, with slowed updates.

    torchrun --nproc-per-node=2 tests/train/elastic.py FOLDER SECONDS COMMAND ...

Each rank leaves its process id in FOLDER. Several commands, with --then between them, are run one
after the other, and every rank says how each ended.
"""

import os
import sys
from itertools import groupby
from pathlib import Path

import faults

from ghostbatch import cli


def main(folder, seconds, words):
    rank = os.environ["RANK"]
    (Path(folder) / f"rank-{rank}").write_text(str(os.getpid()))
    faults.slow_updates(float(seconds))
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
