"""Statistics over ranks: the same as on one, by one small collective per backward."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("ranks.py")
CASES = re.findall(r"^def (case_\w+)", SCRIPT.read_text(), re.MULTILINE)


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_case_holds_on_so_many_ranks(ranks):
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *(f"--nproc-per-node={ranks}", SCRIPT),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert re.findall(r"^(case_\w+) holds", done.stdout, re.MULTILINE) == CASES
