"""Warnings of a library, such as a newer torch, in somebody's run."""

import subprocess
import sys

MODEL = '''
import warnings

from torch import nn


class Warns(nn.Module):
    """Warns at every forward, as torch does of what a later version will remove."""

    def forward(self, x):
        for category in (FutureWarning, DeprecationWarning, UserWarning):
            warnings.warn(f"{category.__name__} of torch:\\n  use another\\n", category)
        return x


def build(num_classes=10, *, in_channels=1, image_size=28):
    sizes = in_channels * image_size**2, num_classes
    return nn.Sequential(Warns(), nn.Flatten(), nn.Linear(*sizes), nn.BatchNorm1d(num_classes))
'''


def test_a_warning_of_a_library_is_one_line_and_does_not_end_the_run(tmp_path):
    (tmp_path / "warns.py").write_text(MODEL)
    flags = "--regime.epochs 0.032 --regime.drops , --model python:warns:build --device cpu"
    command = [sys.executable, "-m", "ghostbatch", "train", "f1-digits", *flags.split()]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert ended.returncode == 0, ended.stderr
    # Python itself hides a DeprecationWarning outside of the main module.
    lines = [line for line in ended.stderr.splitlines() if "torch" in line or "use" in line]
    assert list(dict.fromkeys(lines)) == [
        "ghostbatch: FutureWarning of torch: use another",
        "ghostbatch: UserWarning of torch: use another",
    ]
