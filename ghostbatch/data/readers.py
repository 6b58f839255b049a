"""MNIST and CIFAR through torchvision's readers, and the digits that come with the package."""

import gzip
import pickle
import warnings
import zlib
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from ghostbatch.data.augment import PadCropFlip
from ghostbatch.data.datasets import ImageData, Split
from ghostbatch.errors import InputError, one_line
from ghostbatch.files import no_empty_folders
from ghostbatch.optional import import_torchvision


def digits(data_dir: Path, download: bool) -> ImageData:
    """5,000 MNIST digits that come with the package: 4,000 for training, 1,000 for testing.

    Both parts are sorted by class, so the first n are of few classes: draw a part at random.
    """
    del data_dir, download
    with (files("ghostbatch.data") / "embedded" / "digits.npz").open("rb") as file:
        read = {name: torch.from_numpy(array) for name, array in np.load(file).items()}
    train = Split(read["train_images"].unsqueeze(1), read["train_labels"].long())
    test = Split(read["test_images"].unsqueeze(1), read["test_labels"].long())
    return ImageData("digits", 10, train, test, PadCropFlip(pad=2, fill=0))


def mnist(data_dir: Path, download: bool) -> ImageData:
    """MNIST: 60,000 + 10,000 grey digits of 28 x 28 pixels."""
    return _load_idx("mnist", "MNIST", data_dir, download)


def fashion_mnist(data_dir: Path, download: bool) -> ImageData:
    """Fashion-MNIST: 60,000 + 10,000 grey images of clothes, 28 x 28 pixels."""
    return _load_idx("fashion-mnist", "FashionMNIST", data_dir, download)


def cifar10(data_dir: Path, download: bool) -> ImageData:
    """CIFAR-10: 50,000 + 10,000 colour images of 32 x 32 pixels in ten classes."""
    return _load_cifar("cifar10", "CIFAR10", data_dir, download)


def cifar100(data_dir: Path, download: bool) -> ImageData:
    """CIFAR-100: 50,000 + 10,000 colour images of 32 x 32 pixels in a hundred classes."""
    return _load_cifar("cifar100", "CIFAR100", data_dir, download)


def _load_idx(name: str, kind: str, data_dir: Path, download: bool) -> ImageData:
    """Load one of the two MNIST data sets from its idx files, packed or not."""
    reader = getattr(import_torchvision().datasets, kind)
    folder = data_dir / kind / "raw"
    packed = [folder / file for file, _ in reader.resources]
    plain = [path.with_suffix("") for path in packed]
    if download:
        _download(name, reader, data_dir, folder)
    if all(path.exists() for path in plain):
        train, test = _read(name, reader, data_dir, folder)
    elif all(path.exists() for path in packed):
        with TemporaryDirectory() as scratch:  # the data folder may be read-only
            unpacked = Path(scratch) / kind / "raw"
            unpacked.mkdir(parents=True)
            for archive in packed:
                (unpacked / archive.stem).write_bytes(_gunzip(name, archive))
            train, test = _read(name, reader, Path(scratch), folder)
    else:
        raise _missing(name, plain)

    train, test = (Split(each.data.unsqueeze(1), each.targets.long()) for each in (train, test))
    return ImageData(name, 10, train, test, PadCropFlip(pad=2, fill=0))


def _gunzip(name: str, archive: Path) -> bytes:
    try:
        return gzip.decompress(archive.read_bytes())
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise _damaged(name, archive.parent, f"{archive.name}: {error}") from None


def _load_cifar(name: str, kind: str, data_dir: Path, download: bool) -> ImageData:
    """Load one of the two CIFAR data sets from its pickled files, whose checksums are checked."""
    torchvision = import_torchvision()
    reader = getattr(torchvision.datasets, kind)
    folder = data_dir / reader.base_folder
    sums = dict([*reader.train_list, *reader.test_list])
    sums[reader.meta["filename"]] = reader.meta["md5"]
    if download:
        _download(name, reader, data_dir, folder)
    if not all((folder / file).exists() for file in sums):
        raise _missing(name, [folder / file for file in sums])
    intact = torchvision.datasets.utils.check_integrity
    wrong = [file for file, md5 in sums.items() if not intact(folder / file, md5)]
    if wrong:
        raise _damaged(name, folder, f"the checksum of {', '.join(wrong)} is wrong")
    train, test = _read(name, reader, data_dir, folder)

    def split(part: Any) -> Split:
        images = torch.from_numpy(part.data).permute(0, 3, 1, 2).contiguous()
        return Split(images, torch.tensor(part.targets))

    classes = len(train.classes)
    return ImageData(name, classes, split(train), split(test), PadCropFlip(pad=4, fill=127))


def _read(name: str, reader: Any, root: Path, folder: Path) -> tuple[Any, Any]:
    """Return torchvision's training and test sets below ``root``; errors name ``folder``."""
    try:
        with warnings.catch_warnings():
            # NumPy warns about the old pickle format of CIFAR's files.
            warnings.filterwarnings("ignore", r"dtype\(\): align should be passed")
            return reader(root, train=True), reader(root, train=False)
    except (RuntimeError, ValueError, AssertionError, KeyError, EOFError, pickle.PickleError) as e:
        raise _damaged(name, folder, _one_line(e)) from None


def _download(name: str, reader: Any, root: Path, folder: Path) -> None:
    try:
        with no_empty_folders(folder):  # torchvision makes it first
            reader(root, download=True)
    except (RuntimeError, OSError) as error:
        problem = f"{name} could not be downloaded to {root}: {_one_line(error)}"
        remedy = "get it another way, and set data_dir or GHOSTBATCH_DATA to where it is"
        raise InputError("data", problem, remedy) from None


def _missing(name: str, paths: list[Path]) -> InputError:
    folder = paths[0].parent
    lacking = [path.name for path in paths if not path.exists()]
    what = "is not" if len(lacking) == len(paths) else f"lacks {', '.join(lacking)}"
    remedy = "set download to get it, or set data_dir or GHOSTBATCH_DATA to the folder that has it"
    return InputError("data", f"{name} {what} in {folder}", remedy)


def _damaged(name: str, folder: Path, problem: str) -> InputError:
    remedy = f"delete {folder} and set download to get it again"
    return InputError("data", f"{name} in {folder} is damaged: {problem}", remedy)


def _one_line(error: Exception) -> str:
    return one_line(error) or type(error).__name__
