"""The fingerprint of a data set: tells a resumed run whether its data is still the same."""

import os
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from ghostbatch.data.catalog import Data
from ghostbatch.data.datasets import Info, Split
from ghostbatch.data.decode import Files
from ghostbatch.data.folder import FolderData

COUNTS = {
    "samples": ("training image", "training images"),
    "test_samples": ("test image", "test images"),
    "classes": ("class", "classes"),
}


@dataclass(frozen=True)
class Fingerprint:
    """The sizes of a data set, and digests of what is in it."""

    name: str
    info: Info
    train: str
    """Digest of the training set: of images and labels, or of a folder's file names and sizes."""
    test: str
    """The same of the images for evaluation."""

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain data for JSON."""
        sizes = {**asdict(self.info), "shape": list(self.info.shape)}
        return {**sizes, "train": self.train, "test": self.test}

    def changes_since(self, written: dict[str, Any]) -> str | None:
        """Return in words what is different from what `as_dict` wrote; None if nothing is."""
        now = self.as_dict()
        changes = []
        evaluated = "held-out" if self.info.held_out else "test"
        for field, (one, many) in COUNTS.items():
            if more := now[field] - written[field]:
                word = (one if abs(more) == 1 else many).replace("test", evaluated)
                changes.append(f"{abs(more)} {word} {'more' if more > 0 else 'fewer'}")
        if now["shape"] != written["shape"]:
            shapes = ("x".join(map(str, each["shape"])) for each in (now, written))
            changes.append("images of {} instead of {}".format(*shapes))
        if not changes:
            words = {"train": "other training images", "test": f"other {evaluated} images"}
            changes = [word for part, word in words.items() if now[part] != written[part]]
        if not changes:
            return None
        *most, last = changes
        listed = f"{', '.join(most)} and {last}" if most else last
        return f"{self.name} has {listed} than when this run began"


def fingerprint_of(data: Data) -> Fingerprint:
    """Return the fingerprint of a data set.

    Images in memory are read completely (a second for a gigabyte). Of a folder's images only the
    names, sizes and labels are: to read them would take as long as an epoch.
    """
    if isinstance(data, FolderData):
        digests = (_digest_files(part) for part in (data.train, data.test))
    else:
        digests = (_digest_split(part) for part in (data.train, data.test))
    return Fingerprint(data.name, data.info, *digests)


def _digest_split(split: Split) -> str:
    digest = blake2b(digest_size=16)
    for tensor in (split.images, split.labels):
        digest.update(tensor.cpu().contiguous().numpy().data)
    return digest.hexdigest()


def _digest_files(files: Files) -> str:
    """Return a digest of labels, sizes and paths, less what all paths begin with."""
    digest = blake2b(digest_size=16)
    begin = len(os.path.commonpath(files.paths))
    for path, label in zip(files.paths, files.labels, strict=True):
        try:
            size = Path(path).stat().st_size
        except OSError:  # such as a link to nothing, which the feed reports as unreadable
            size = -1
        digest.update(f"{label} {size} ".encode() + os.fsencode(path[begin:]) + b"\0")
    return digest.hexdigest()
