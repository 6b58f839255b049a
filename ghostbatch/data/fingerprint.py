"""The fingerprint of a data set: tells a resumed run whether its data is still the same."""

import os
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from ghostbatch.data.catalog import Data
from ghostbatch.data.datasets import Info, Split
from ghostbatch.data.decode import Files

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
        """Return the differences from what `as_dict` wrote in words; None if there are none."""
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
    names, sizes and labels are read: the images would take as long as an epoch.
    """
    return Fingerprint(data.name, data.info, _digest(data.train), _digest(data.test))


def _digest(part: Split | Files) -> str:
    """Return a digest of images and labels, or of labels, sizes and the differing ends of paths."""
    digest = blake2b(digest_size=16)
    if isinstance(part, Split):
        for tensor in (part.images, part.labels):
            digest.update(tensor.cpu().contiguous().numpy().data)
        return digest.hexdigest()
    begin = len(os.path.commonpath(part.paths))
    for path, label in zip(part.paths, part.labels, strict=True):
        try:
            size = Path(path).stat().st_size
        except OSError:  # such as a link to nothing, which the feed reports as unreadable
            size = -1
        digest.update(f"{label} {size} ".encode() + os.fsencode(path[begin:]) + b"\0")
    return digest.hexdigest()
