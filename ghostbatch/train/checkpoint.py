"""Checkpoints: two files, the newer one and the one before, each with a checksum of its own."""

import warnings
from hashlib import blake2b
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import torch
from torch import Tensor

from ghostbatch.errors import InputError
from ghostbatch.files import DamagedError, atomic_file, check_regular
from ghostbatch.recipe import Recipe

FORMAT = 4
"""Number of the format; a checkpoint of another one is refused."""


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(self, folder: Path, recipe: Recipe) -> None:
        self.newest = folder / "checkpoint.pt"
        self.previous = folder / "checkpoint.previous.pt"
        self.recipe = recipe
        self.header: dict[str, Any] = {}
        """What run.json holds, so that it can be rebuilt from a checkpoint."""
        self._sound = False  # whether the newest is known to be intact, and so worth keeping

    def exist(self) -> bool:
        """Return whether there is a checkpoint."""
        return self.newest.exists() or self.previous.exists()

    def save(self, state: dict[str, Any], metrics: int) -> None:
        """Write the newest checkpoint; keep the one before as the previous one."""
        content = {
            "format": FORMAT,
            "recipe": self.recipe.as_dict(),
            "header": self.header,
            "metrics": metrics,
            "state": state,
        }
        with atomic_file(self.newest, self.previous if self._sound else None) as file:
            torch.save({**content, "checksum": checksum(content)}, file)
        self._sound = True

    def load(self, records: int | None = None) -> dict[str, Any] | None:
        """Return the newest intact checkpoint, or None if there is no checkpoint.

        ``records`` is the length of metrics.jsonl; a checkpoint that was taken later is not used.
        """
        damages = []
        for path in filter(Path.exists, (self.newest, self.previous)):
            try:
                content = read_checkpoint(path)
                if records is not None and content["metrics"] > records:
                    raise DamagedError("was taken when metrics.jsonl was longer than it is now")
            except DamagedError as damage:
                damages.append(f"{path} {damage}")
                continue
            self._check(path, content)
            if damages:
                warnings.warn(f"{damages[0]}; continuing from {path.name}", stacklevel=2)
            self._sound = path == self.newest
            return content
        if damages:
            raise InputError("checkpoint", damages[0], "delete it to start this run again")
        return None

    def _check(self, path: Path, content: dict[str, Any]) -> None:
        """Refuse an intact checkpoint of another version or of another recipe."""
        if content["format"] != FORMAT:
            order = "newer" if content["format"] > FORMAT else "older"
            raise InputError(
                "checkpoint",
                f"{path} has format {content['format']}, {order} than this program's {FORMAT}",
                "use the ghostbatch that wrote it, or choose another folder",
            )
        if self.recipe.differences(content["recipe"]):
            raise InputError(
                "checkpoint",
                f"{path} belongs to another recipe",
                "delete it to start this run again",
            )


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Return the content of a checkpoint file; raise `DamagedError` unless it is intact.

    A checksum of the values does not see that two equal tensors share their memory, for example.
    So the CRCs of the zip file that torch.save writes are checked, too: torch.load does not.
    """
    check_regular(path)
    try:
        with ZipFile(path) as archive, warnings.catch_warnings(action="ignore"):
            if (name := archive.testzip()) is not None:
                raise DamagedError(f"has changed since it was written (in {name})")
            content = torch.load(path, map_location="cpu", weights_only=True)
        written = content.pop("checksum", None)
        intact = written == checksum(content)
    except DamagedError:
        raise
    except Exception as error:
        reason = str(error).strip().split("\n")[0].split(". ")[0]
        raise DamagedError(f"cannot be read ({reason or type(error).__name__})") from None
    if written is None or not {"format", "recipe"} <= content.keys():
        raise DamagedError("is not a checkpoint of ghostbatch")
    if not intact:
        raise DamagedError("has changed since it was written (its checksum differs)")
    return dict(content)


def checksum(content: Any) -> str:
    """Return a digest of plain containers, numbers and tensors, in their order.

    >>> checksum({"w": torch.zeros(2)}) == checksum({"w": torch.tensor([0.0, -0.0])})
    False
    """
    digest = blake2b(digest_size=16)

    def add(value: Any) -> None:
        if isinstance(value, dict):
            digest.update(f"{len(value)} pairs,".encode())
            for key, item in value.items():
                add(key)
                add(item)
        elif isinstance(value, list | tuple):
            digest.update(f"{len(value)} items,".encode())
            for item in value:
                add(item)
        elif isinstance(value, Tensor):
            digest.update(f"{value.dtype} {tuple(value.shape)},".encode())
            digest.update(value.detach().cpu().reshape(-1).view(torch.uint8).numpy().data)
        else:
            digest.update(f"{value!r},".encode())

    add(content)
    return digest.hexdigest()
