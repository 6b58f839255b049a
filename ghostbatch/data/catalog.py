"""Data sets by name: the sizes of each, and how to load it."""

import os
from collections.abc import Callable
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from ghostbatch.data import readers
from ghostbatch.data.datasets import ImageData, Info
from ghostbatch.data.feed import Feed, TensorFeed
from ghostbatch.data.folder import FolderData, FolderFeed, OnBadImage, list_folder
from ghostbatch.data.synthetic import parse, synthetic
from ghostbatch.errors import InputError

Data = ImageData | FolderData
Loader = Callable[[Path, bool], Data]
"""Takes the folder that holds all data sets, and whether to download missing files."""


def imagenet(data_dir: Path, download: bool) -> FolderData:
    """ImageNet (ILSVRC 2012): 1,281,167 + 50,000 images in a thousand classes."""
    root = data_dir / "imagenet"
    if not root.is_dir():
        cannot = " and cannot be downloaded" if download else ""
        raise InputError(
            "data",
            f"imagenet is not in {root}{cannot}",
            "get it from image-net.org into train/CLASS and val/CLASS there, or set data_dir or "
            "GHOSTBATCH_DATA to where it is",
        )
    return replace(list_folder(root, "imagenet"), pixels=IMAGENET_PIXELS)


IMAGENET_PIXELS = (
    (255 * 0.485, 255 * 0.456, 255 * 0.406),
    (255 * 0.229, 255 * 0.224, 255 * 0.225),
)
"""Mean and standard deviation of each channel, as torchvision and others use them."""

DATASETS: dict[str, Loader] = {
    "digits": readers.digits,
    "mnist": readers.mnist,
    "fashion-mnist": readers.fashion_mnist,
    "cifar10": readers.cifar10,
    "cifar100": readers.cifar100,
    "imagenet": imagenet,
}

INFO: dict[str, Info] = {
    "digits": Info(4_000, 1_000, 10, (1, 28, 28)),
    "mnist": Info(60_000, 10_000, 10, (1, 28, 28)),
    "fashion-mnist": Info(60_000, 10_000, 10, (1, 28, 28)),
    "cifar10": Info(50_000, 10_000, 10, (3, 32, 32)),
    "cifar100": Info(50_000, 10_000, 100, (3, 32, 32)),
    "imagenet": Info(1_281_167, 50_000, 1000, (3, 224, 224)),
}


def find_dataset(name: str) -> Loader:
    """Return the loader for one of `DATASETS`, ``folder:PATH`` or ``synthetic:SHAPE``."""
    if name in DATASETS:
        return DATASETS[name]
    family, _, rest = name.partition(":")
    if family == "synthetic":
        parse(rest)
        return lambda _data_dir, _download: synthetic(rest)
    if family == "folder" and rest:
        return lambda _data_dir, _download: list_folder(Path(rest), name)
    close = get_close_matches(name, DATASETS, n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    raise InputError(
        "data",
        f"{name!r} is unknown",
        f"{hint}choose one of {', '.join(DATASETS)}, folder:PATH or synthetic:SHAPE",
    )


def find_info(name: str) -> Info:
    """Return the sizes of a data set without reading its files; a folder is listed.

    >>> find_info("cifar10").samples
    50000
    """
    find_dataset(name)
    family, _, rest = name.partition(":")
    if family == "synthetic":
        return parse(rest)
    if family == "folder":
        return list_folder(Path(rest), name).info
    return INFO[name]


def load(name: str, data_dir: str | os.PathLike[str] | None = None, download: bool = False) -> Data:
    """Load a data set by name and check its sizes.

    Args:
        name: one of `DATASETS`, ``folder:PATH`` or ``synthetic:SHAPE``.
        data_dir: the folder that holds the data sets, in torchvision's layout; None is the
            environment variable GHOSTBATCH_DATA, or else ``data`` in the current folder.
        download: download missing files.

    """
    loader = find_dataset(name)
    root = find_data_dir(data_dir)
    data = loader(root, download)
    if name in INFO and data.info != INFO[name]:
        raise InputError(
            "data",
            f"{name} in {root} has {data.info.samples:,} + {data.info.test_samples:,} images in "
            f"{data.info.classes} classes, not {INFO[name].samples:,} + "
            f"{INFO[name].test_samples:,} in {INFO[name].classes}",
            "get the complete data set, or load a part of it as folder:PATH",
        )
    return data


def find_data_dir(data_dir: str | os.PathLike[str] | None = None) -> Path:
    """Return the absolute path of ``data_dir``, else of GHOSTBATCH_DATA, else of ``data`` here."""
    chosen = Path(data_dir or os.environ.get("GHOSTBATCH_DATA") or "data")
    return chosen.expanduser().absolute()  # messages show the path


def open_feed(
    data: Data, *, workers: int = 2, on_bad_image: OnBadImage = "fatal", **settings: Any
) -> Feed:
    """Return the feed for this kind of data; ``settings`` are the arguments of `TensorFeed`."""
    if isinstance(data, FolderData):
        return FolderFeed(data, workers=workers, on_bad_image=on_bad_image, **settings)
    return TensorFeed(data, **settings)
