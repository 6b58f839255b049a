"""Data sets by name: the sizes of each, and how to load it."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from ghostbatch.data import readers
from ghostbatch.data.datasets import ImageData, Info, Pixels
from ghostbatch.data.feed import TensorFeed
from ghostbatch.data.folder import FolderData, FolderFeed, list_folder
from ghostbatch.data.skipped import OnBadImage, SkippedImages
from ghostbatch.data.synthetic import parse, synthetic
from ghostbatch.errors import InputError, check_choice, check_is

Data = ImageData | FolderData
"""A data set: its images in memory, or the paths of its files."""
Feed = TensorFeed | FolderFeed
"""Yields the batches of a run; random draws do not depend on how a batch is split."""
Loader = Callable[[Path, bool], Data]
"""Takes the folder that holds all data sets, and whether to download missing files."""


def imagenet(data_dir: Path, download: bool) -> FolderData:
    """ImageNet (ILSVRC 2012): 1,281,167 + 50,000 images in a thousand classes."""
    root = data_dir / "imagenet"
    if not root.is_dir():
        cannot = " and cannot be downloaded" if download else ""
        get = "get it from image-net.org into train/CLASS and val/CLASS there"
        remedy = f"{get}, or set data_dir or GHOSTBATCH_DATA to where it is"
        raise InputError("data", f"imagenet is not in {root}{cannot}", remedy)
    return replace(list_folder(root, "imagenet"), pixels=IMAGENET_PIXELS)


IMAGENET_PIXELS: Pixels = (
    (255 * 0.485, 255 * 0.456, 255 * 0.406),
    (255 * 0.229, 255 * 0.224, 255 * 0.225),
)
"""Those of ImageNet, as torchvision and others use them."""

Normalisation = Literal["data", "authors"]
"""Whose mean and deviation normalise pixels: the data set's own, or the paper's authors'."""
AUTHORS_PIXELS: dict[int, Pixels] = {1: ((127.5,), (127.5,)), 3: IMAGENET_PIXELS}
"""What the paper's authors use for images of one and of three channels."""

DATASETS: dict[str, Loader] = {
    "digits": readers.digits,
    "mnist": readers.mnist,
    "fashion-mnist": readers.fashion_mnist,
    "cifar10": readers.cifar10,
    "cifar100": readers.cifar100,
    "imagenet": imagenet,
}
"""Name to loader."""

INFO: dict[str, Info] = {
    "digits": Info(4_000, 1_000, 10, (1, 28, 28)),
    "mnist": Info(60_000, 10_000, 10, (1, 28, 28)),
    "fashion-mnist": Info(60_000, 10_000, 10, (1, 28, 28)),
    "cifar10": Info(50_000, 10_000, 10, (3, 32, 32)),
    "cifar100": Info(50_000, 10_000, 100, (3, 32, 32)),
    "imagenet": Info(1_281_167, 50_000, 1000, (3, 224, 224)),
}
"""Sizes of each of `DATASETS`, so that runs can be planned before its files are read."""


def find_dataset(name: str) -> Loader:
    """Return the loader for one of `DATASETS`, ``folder:PATH`` or ``synthetic:SHAPE``."""
    family, _, rest = name.partition(":")
    if family == "synthetic":
        parse(rest)
        return lambda _data_dir, _download: synthetic(rest)
    if family == "folder" and rest:
        return lambda _data_dir, _download: list_folder(Path(rest), name)
    check_choice("data", name, DATASETS, "folder:PATH or synthetic:SHAPE")
    return DATASETS[name]


def find_info(name: str, image_size: int | None = None, holdout: int = 0) -> Info:
    """Return the sizes of a data set without reading its files; a folder is listed.

    With ``holdout`` they are those after that many training images were kept aside for evaluation.

    >>> find_info("cifar10").samples
    50000
    """
    check_image_size(name, image_size)
    if name in INFO:
        info = INFO[name]
    elif name.startswith("synthetic:"):
        info = parse(name.removeprefix("synthetic:"))
    else:
        info = find_dataset(name)(Path(), False).info
    if image_size is not None:
        info = replace(info, shape=(3, image_size, image_size))
    return info.hold_out(holdout) if holdout else info


def is_folder(name: str) -> bool:
    """Return whether a data set is a folder of image files, which are decoded during the run."""
    return name == "imagenet" or name.startswith("folder:")


def check_image_size(name: str, image_size: int | None) -> None:
    """Refuse a size that is not a number of pixels, and any size for images of a fixed size."""
    if image_size is None:
        return
    if not isinstance(image_size, int) or image_size < 1:
        problem = f"{image_size!r} is not a number of pixels"
        raise InputError("image_size", problem, "use 224, for example")
    if not is_folder(name):
        problem = f"the images of {name} have a fixed size"
        raise InputError("image_size", problem, "leave it out: only image folders take it")


def load(
    name: str,
    data_dir: str | os.PathLike[str] | None = None,
    download: bool = False,
    image_size: int | None = None,
    holdout: int = 0,
    normalisation: Normalisation = "data",
) -> Data:
    """Load a data set by name and check its sizes.

    Args:
        name: one of `DATASETS`, ``folder:PATH`` or ``synthetic:SHAPE``.
        data_dir: the folder that holds the data sets, in torchvision's layout; None is the
            environment variable GHOSTBATCH_DATA, or else ``data`` in the current folder.
        download: download missing files.
        image_size: side of the images of a folder; None is 224.
        holdout: replace the test set by this number of training images; 0 is no change.
        normalisation: mean and deviation of the pixels: those of the data set, or `AUTHORS_PIXELS`.

    """
    check_image_size(name, image_size)
    check_choice("normalisation", normalisation, get_args(Normalisation))
    root = find_data_dir(data_dir)
    data = find_dataset(name)(root, download)
    if isinstance(data, FolderData) and image_size is not None:
        data = replace(data, size=image_size)
    info = data.info
    if name in INFO and info != find_info(name, image_size):
        found = f"{info.samples:,} + {info.test_samples:,} images in {info.classes} classes"
        known = INFO[name]
        expected = f"{known.samples:,} + {known.test_samples:,} in {known.classes}"
        remedy = "get the complete data set, or load a part of it as folder:PATH"
        raise InputError("data", f"{name} in {root} has {found}, not {expected}", remedy)
    if isinstance(data, ImageData):  # a loss would fail on wrong labels, on a GPU without a message
        labels = torch.cat([data.train.labels, data.test.labels])
        wrong = labels[(labels < 0) | (labels >= info.classes)]
        if len(wrong):
            problem = f"{name} in {root} has a label {int(wrong[0])}, but {info.classes} classes"
            raise InputError("data", problem, "get the data set again")
    if normalisation == "authors":
        if info.shape[0] not in AUTHORS_PIXELS:
            problem = f"the authors have none for images of {info.shape[0]} channels"
            raise InputError("normalisation", problem, "use data")
        data = replace(data, pixels=AUTHORS_PIXELS[info.shape[0]])
    return data.hold_out(holdout) if holdout else data


def find_data_dir(data_dir: str | os.PathLike[str] | None = None) -> Path:
    """Return the absolute path of ``data_dir``, else of GHOSTBATCH_DATA, else of ``data`` here."""
    if data_dir is not None:
        check_is("data_dir", data_dir, (str, os.PathLike), "a path")
    chosen = Path(data_dir or os.environ.get("GHOSTBATCH_DATA") or "data")
    return chosen.expanduser().absolute()  # messages show the path


def open_feed(
    data: Data,
    *,
    workers: int = 2,
    on_bad_image: OnBadImage = "fatal",
    skipped: SkippedImages | None = None,
    patch: int = 1,
    **settings: Any,
) -> Feed:
    """Return the feed for this kind of data; ``settings`` are the arguments of `TensorFeed`.

    The feed of an image folder yields the images themselves, whatever ``patch`` is.
    """
    if isinstance(data, FolderData):
        settings |= {"workers": workers, "on_bad_image": on_bad_image, "skipped": skipped}
        return FolderFeed(data, **settings)
    return TensorFeed(data, patch=patch, **settings)
