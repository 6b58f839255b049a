"""Images per second from a folder: ghostbatch against a plain torchvision DataLoader.

    python benchmarks/image_folder.py   # writes 1,024 JPEG files of 500 x 375 first
    python benchmarks/image_folder.py --root DIR   # your own folder, with train/ and val/

Both decode, resize to 256, crop 224 at random, flip and normalise, with the same number of worker
processes. They take turns in one run, and the medians are compared.
"""

import argparse
import gc
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from statistics import median

import numpy as np
import torch
from norm_layer import hardware
from PIL import Image

from ghostbatch.data import load
from ghostbatch.data.folder import FolderFeed
from ghostbatch.optional import import_torchvision

BATCH = 64


def main() -> None:
    """Measure, print the table, and write JSON if ``--json`` is given."""
    options = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    options.add_argument("--root", type=Path)
    options.add_argument("--workers", type=int, default=2)
    options.add_argument("--batches", type=int, default=8)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--json", type=Path, help="also write the figures to this file")
    chosen = options.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        root = chosen.root or write_images(Path(scratch))
        rivals = {
            "ghostbatch": ours(root, chosen.workers),
            "torchvision": plain(root, chosen.workers),
        }
        rates: dict[str, list[float]] = {name: [] for name in rivals}
        for _ in range(chosen.rounds):
            for name, batches in rivals.items():
                rates[name].append(speed(batches, chosen.batches))
    for name, found in rates.items():
        print(f"{name:<12} {median(found):8.1f} images/s")
    ratios = sorted(a / b for a, b in zip(*rates.values(), strict=True))
    print(f"ours is {median(ratios):.2f} x torchvision ({ratios[0]:.2f}-{ratios[-1]:.2f})")
    if chosen.json:
        chosen.json.parent.mkdir(parents=True, exist_ok=True)
        report = {"hardware": hardware(torch.device("cpu")), "workers": chosen.workers}
        report |= {"images_per_second": rates, "ratios": ratios}
        chosen.json.write_text(json.dumps(report, indent=1) + "\n")


def speed(start: Callable[[], Iterator[object]], batches: int) -> float:
    """Return images per second after the first two batches, which wait for the workers."""
    stream = start()
    for _ in islice(stream, 2):
        pass
    began = time.perf_counter()
    for _ in islice(stream, batches):
        pass
    rate = BATCH * batches / (time.perf_counter() - began)
    del stream
    gc.collect()  # end these workers before the next ones are forked
    return rate


def ours(root: Path, workers: int) -> Callable[[], Iterator[object]]:
    """Return a function that starts the feed that `ghostbatch.train` uses."""
    data = load(f"folder:{root}")
    settings = {"batch": BATCH, "seed": 0, "augment": True, "workers": workers}

    def start() -> Iterator[object]:
        feed = FolderFeed(data, device=torch.device("cpu"), dtype=torch.float32, **settings)  # type: ignore[arg-type]
        update = 0
        while True:
            yield from feed.micro_batches(update, [slice(0, BATCH)])
            update += 1

    return start


def plain(root: Path, workers: int) -> Callable[[], Iterator[object]]:
    """Return a function that starts a plain torchvision data set in a DataLoader."""
    vision = import_torchvision()
    from torchvision import transforms as T  # noqa: PLC0415 (after the import above)

    steps = [T.Resize(256), T.RandomCrop(224), T.RandomHorizontalFlip(), T.ToTensor()]
    steps.append(T.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    data = vision.datasets.ImageFolder(root / "train", T.Compose(steps))

    def start() -> Iterator[object]:
        while True:
            yield from torch.utils.data.DataLoader(
                data, batch_size=BATCH, shuffle=True, num_workers=workers, drop_last=True
            )

    return start


def write_images(root: Path, count: int = 1024) -> Path:
    """Write smooth images with some noise, of the usual size of ImageNet's; return ``root``."""
    draw = np.random.default_rng(0)
    for part, number in (("train", count), ("val", 8)):
        for index in range(number):
            folder = root / part / f"class{index % 4}"
            folder.mkdir(parents=True, exist_ok=True)
            coarse = Image.fromarray(draw.integers(0, 256, (12, 16, 3), dtype=np.uint8))
            smooth = np.asarray(coarse.resize((500, 375), Image.Resampling.BICUBIC), dtype=np.int16)
            noisy = (smooth + draw.normal(0, 8, smooth.shape)).clip(0, 255).astype(np.uint8)
            Image.fromarray(noisy).save(folder / f"{index}.jpg", quality=90)
    return root


if __name__ == "__main__":
    main()
