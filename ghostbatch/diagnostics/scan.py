"""Moves a model's weights about and puts them back, and keeps what was seen on the way."""

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ghostbatch.diagnostics.sharded import as_dtensor
from ghostbatch.errors import InputError
from ghostbatch.nn import to_ghost, to_plain
from ghostbatch.ops.backends.select import has_kernels

PLAIN = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)

ANY_BATCH = 1 << 40
"""A ghost that no batch fills."""

SAVE_SECONDS = 10.0
"""Time between writes of a scan's file."""


class Surroundings:
    """A model's trainable weights, to be moved along random directions; undone at the end."""

    def __init__(self, model: nn.Module) -> None:
        self._weights: list[Tensor] = [p for p in model.parameters() if p.requires_grad]
        if not self._weights:
            raise InputError("model", "nothing in it is trainable", "set requires_grad")
        if len({w.device for w in self._weights}) > 1 or as_dtensor(self._weights[0]) is not None:
            raise InputError("model", "its weights are not on one device", "move them to one")
        self._buffers = list(model.buffers())
        self._start = [w.detach().clone() for w in self._weights]
        self._kept = [b.detach().clone() for b in self._buffers]
        self.count = sum(w.numel() for w in self._weights)
        self._device, dtype = self._weights[0].device, torch.float32
        for weight in self._weights:
            dtype = torch.promote_types(dtype, weight.dtype)
        self._direction = torch.empty(self.count, device=self._device, dtype=dtype)
        self._steps = self._views()
        self._generator = torch.Generator(self._device)

    def step(self, distance: float, seed: int) -> None:
        """Stand at a distance from the start, in the direction that the seed stands for.

        The direction is uniform on the sphere: a normal vector over its length.
        """
        self._generator.manual_seed(seed)
        self._direction.normal_(generator=self._generator)
        self._direction.mul_(distance / torch.linalg.vector_norm(self._direction))
        steps = [s.to(w.dtype) for s, w in zip(self._steps, self._weights, strict=True)]
        torch._foreach_copy_(self._weights, self._start)
        torch._foreach_add_(self._weights, steps)

    def _views(self) -> list[Tensor]:
        """The direction, part by part in the layout of the weights, so adding is one kernel."""
        parts = self._direction.split([w.numel() for w in self._weights])
        layouts = zip(parts, self._start, strict=True)
        return [part.as_strided(start.shape, start.stride()) for part, start in layouts]

    def __enter__(self) -> "Surroundings":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Put everything back, bit by bit."""
        with torch.no_grad():
            for now, before in zip(
                [*self._weights, *self._buffers], [*self._start, *self._kept], strict=True
            ):
                now.copy_(before)


@contextmanager
def batch_statistics(model: nn.Module) -> Iterator[None]:
    """Batch norm by the batch at hand, its buffers left alone; everything else in evaluation.

    One ghost as large as any batch is the same norm, and by our kernels several times as fast.
    """
    modes = {module: module.training for module in model.modules()}
    tracking = {m: m.track_running_stats for m in modes if isinstance(m, _BatchNorm)}
    plain = [m for m in tracking if type(m) in PLAIN and m.affine and has_kernels(m.weight)]
    try:
        for module in modes:
            module.training = module in tracking
        for norm in tracking:
            norm.track_running_stats = False  # then PyTorch's layer, and ours, moves nothing
        for norm in plain:
            to_ghost(norm, ANY_BATCH)
        yield
    finally:
        for norm in plain:
            to_plain(norm)
        for module, mode in modes.items():
            module.training = mode
        for norm, track in tracking.items():
            norm.track_running_stats = track


class BatchedLoss:
    """Mean loss over samples in a fixed order, in batches: a function of the model.

    Norm layers see one batch at a time, so its size is part of the function. Nothing is drawn: what
    the inputs are (no augmentation) is what the model sees.

    Args:
        inputs: all samples, on the device; they may be bytes that ``prepare`` turns into numbers.
        labels: as many.
        batch: samples at a time; the last batch may be smaller.
        prepare: from a batch of inputs to what the model takes.
        criterion: from outputs and labels to the sum of losses; cross-entropy if None.

    """

    def __init__(
        self,
        inputs: Tensor,
        labels: Tensor,
        *,
        batch: int = 1000,
        prepare: Callable[[Tensor], Tensor] | None = None,
        criterion: Callable[[Tensor, Tensor], Tensor] | None = None,
    ) -> None:
        if len(inputs) != len(labels) or not len(labels):
            raise InputError(
                "labels", f"{len(labels)} for {len(inputs)} inputs", "give one for each"
            )
        if batch < 1 or (len(labels) % batch == 1 and batch > 1):
            raise InputError(
                "batch",
                f"{batch} leaves {len(labels) % max(1, batch)} of {len(labels)} samples",
                "use a size that divides them: one sample has no batch statistics",
            )
        self.inputs, self.labels, self.batch = inputs, labels, batch
        self.prepare = prepare or (lambda images: images)
        self.criterion = criterion or _summed_cross_entropy

    def __call__(self, model: nn.Module) -> Tensor:
        """The mean, in fp64, still on the device."""
        total = torch.zeros((), dtype=torch.float64, device=self.labels.device)
        for images, labels in zip(
            self.inputs.split(self.batch), self.labels.split(self.batch), strict=True
        ):
            total += self.criterion(model(self.prepare(images)), labels)
        return total / len(self.labels)


def _summed_cross_entropy(outputs: Tensor, labels: Tensor) -> Tensor:
    wide = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
    return F.cross_entropy(wide, labels, reduction="none").sum(dtype=torch.float64)


class Scan:
    """Losses measured so far; with a file, they outlast the process.

    Args:
        path: written when it is due and when the scan ends, however it does; never half.
        recipe: what must be the same for the losses to belong together.

    """

    def __init__(self, path: Path | None, recipe: dict[str, Any]) -> None:
        self.losses: list[float] = []
        self._path, self._recipe = path, recipe
        self._written = time.monotonic()
        if path is not None and path.exists():
            self.losses = self._read(path)

    def add(self, loss: float) -> None:
        """Keep one more."""
        self.losses.append(loss)
        if time.monotonic() - self._written > SAVE_SECONDS:
            self._write()

    def __enter__(self) -> "Scan":
        return self

    def __exit__(self, *_: object) -> None:
        """Write what there is."""
        self._write()

    def _read(self, path: Path) -> list[float]:
        try:
            saved = json.loads(path.read_text())
            losses = [float(loss) for loss in saved.pop("losses")]
            near = abs(saved["origin"] - self._recipe["origin"]) <= 1e-6 * abs(saved["origin"])
        except (ValueError, TypeError, KeyError, AttributeError):
            raise InputError("resume", f"{path} holds no scan", "name another file") from None
        different = [k for k in self._recipe if k != "origin" and saved.get(k) != self._recipe[k]]
        if different or not (near or saved["origin"] == self._recipe["origin"]):
            fields = ", ".join(different or ["origin"])
            raise InputError(
                "resume", f"{path} is of another scan ({fields} differ)", "name another file"
            )
        return losses

    def _write(self) -> None:
        if self._path is None:
            return
        partial = self._path.with_name(self._path.name + ".partial")
        with partial.open("w") as file:
            json.dump({**self._recipe, "losses": self.losses}, file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(self._path)
        self._written = time.monotonic()


def key(seed: int, purpose: str, index: int = 0) -> int:
    """A 63-bit number for one draw; no two purposes share one."""
    digest = blake2b(f"{seed}/{purpose}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1
