"""Checkpoints: two files, the newer one and the one before, each with a checksum of its own."""

import warnings
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ghostbatch.errors import InputError
from ghostbatch.files import atomic_file
from ghostbatch.recipe import Recipe

FORMAT = 2


class DamagedError(Exception):
    """A checkpoint file that cannot be used."""


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(self, folder: Path, recipe: Recipe) -> None:
        self.newest = folder / "checkpoint.pt"
        self.previous = folder / "checkpoint.previous.pt"
        self.recipe = recipe
        self._sound = False  # whether the newest is known to be intact, and so worth keeping

    def exist(self) -> bool:
        """Return whether there is a checkpoint."""
        return self.newest.exists() or self.previous.exists()

    def save(self, state: dict[str, Any], metrics: int) -> None:
        """Write the newest checkpoint; keep the one before as the previous one."""
        recipe = self.recipe.as_dict()
        content = {"format": FORMAT, "recipe": recipe, "metrics": metrics, "state": state}
        with atomic_file(self.newest, self.previous if self._sound else None) as file:
            torch.save({**content, "checksum": checksum(content)}, file)
        self._sound = True

    def load(self) -> dict[str, Any] | None:
        """Return the newest intact checkpoint, or None if there is no checkpoint."""
        damages = []
        for path in filter(Path.exists, (self.newest, self.previous)):
            try:
                content = self._read(path)
            except DamagedError as damage:
                damages.append(f"{path} {damage}")
                continue
            if damages:
                warnings.warn(f"{damages[0]}; continuing from {path.name}", stacklevel=2)
            self._sound = path == self.newest
            return content
        if damages:
            raise InputError("checkpoint", damages[0], "delete it to start this run again")
        return None

    def _read(self, path: Path) -> dict[str, Any]:
        try:
            content = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:
            reason = str(error).strip().split("\n")[0].split(". ")[0]
            raise DamagedError(f"cannot be read ({reason or type(error).__name__})") from None
        if not isinstance(content, dict) or not {"format", "recipe"} <= content.keys():
            raise DamagedError("is not a checkpoint of ghostbatch")
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
        if content.pop("checksum", None) != checksum(content):
            raise DamagedError("has changed since it was written (its checksum differs)")
        return content


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
