"""Folders of tiny images for tests of data, runs and commands."""

from pathlib import Path

import numpy as np
from PIL import Image

CLASSES = ("ant", "bee", "cow")
SIZE = 12


def write_images(root: Path, train: int = 8, val: int = 3) -> Path:
    """Write as many random images per class below ``root/train`` and ``root/val``."""
    draw = np.random.default_rng(0)
    for part, count in (("train", train), ("val", val)):
        for name in CLASSES:
            (root / part / name).mkdir(parents=True)
            for number in range(count):
                pixels = draw.integers(0, 256, (SIZE, SIZE + number % 3, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(root / part / name / f"{number}.png")
    return root
