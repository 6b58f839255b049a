"""The distance of weights that are spread over ranks is that of the whole model."""

import re
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).with_name("ranks.py")
CASES = re.findall(r"^def (case_\w+)", SCRIPT.read_text(), re.MULTILINE)


def test_every_case_holds_on_two_ranks():
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node=2", SCRIPT),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert re.findall(r"^(case_\w+) holds", done.stdout, re.MULTILINE) == CASES
