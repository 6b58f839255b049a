"""The parts of a random potential scan: random steps, batch statistics, the loss, its file."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ghostbatch.diagnostics.sharded import as_dtensor
from ghostbatch.errors import InputError
from ghostbatch.files import atomic_file
from ghostbatch.nn import to_ghost, to_plain
from ghostbatch.ops.backends.select import has_kernels

PLAIN = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)

ANY_BATCH = 1 << 40
"""A ghost size above that of any batch."""

SAVE_SECONDS = 10.0
"""Seconds between writes of a scan's file."""


class RandomSteps:
    """Moves a model's trainable weights along random directions, and restores them on exit."""

    def __init__(self, model: nn.Module) -> None:
        self._weights: list[Tensor] = [p for p in model.parameters() if p.requires_grad]
        if not self._weights:
            raise InputError("model", "has no trainable parameters", "set requires_grad")
        if len({w.device for w in self._weights}) > 1 or as_dtensor(self._weights[0]) is not None:
            raise InputError("model", "its weights are not on one device", "move them to one")
        self._buffers = list(model.buffers())
        self._start = [w.detach().clone() for w in self._weights]
        self._start_buffers = [b.detach().clone() for b in self._buffers]
        self.count = sum(w.numel() for w in self._weights)
        self._device, dtype = self._weights[0].device, torch.float32
        for weight in self._weights:
            dtype = torch.promote_types(dtype, weight.dtype)
        self._direction = torch.empty(self.count, device=self._device, dtype=dtype)
        self._steps = self._views()
        self._generator = torch.Generator(self._device)

    def step(self, distance: float, seed: int) -> None:
        """Set the weights to a point at ``distance`` from the start, in a random direction.

        The direction is uniform on the sphere: a normal vector over its length.
        """
        self._generator.manual_seed(seed)
        self._direction.normal_(generator=self._generator)
        self._direction.mul_(distance / torch.linalg.vector_norm(self._direction))
        steps = [s.to(w.dtype) for s, w in zip(self._steps, self._weights, strict=True)]
        torch._foreach_copy_(self._weights, self._start)
        torch._foreach_add_(self._weights, steps)

    def _views(self) -> list[Tensor]:
        """Return views of the direction in the layouts of the weights, so adding is one kernel."""
        parts = self._direction.split([w.numel() for w in self._weights])
        layouts = zip(parts, self._start, strict=True)
        return [part.as_strided(start.shape, start.stride()) for part, start in layouts]

    def __enter__(self) -> "RandomSteps":
        return self

    def __exit__(self, *_: object) -> None:
        """Restore weights and buffers, bit for bit."""
        tensors = [*self._weights, *self._buffers]
        with torch.no_grad():
            for tensor, start in zip(tensors, [*self._start, *self._start_buffers], strict=True):
                tensor.copy_(start)


@contextmanager
def batch_statistics(model: nn.Module) -> Iterator[None]:
    """Put the model into evaluation mode, except that batch norms use batch statistics.

    A ghost norm with one ghost per batch is the same function, and several times as fast where
    there are kernels for it.
    """
    modes = {module: module.training for module in model.modules()}
    tracking = {m: m.track_running_stats for m in modes if isinstance(m, _BatchNorm)}
    plain = [m for m in tracking if type(m) in PLAIN and m.affine and has_kernels(m.weight)]
    try:
        for module in modes:
            module.training = module in tracking
        for norm in tracking:
            norm.track_running_stats = False  # then neither PyTorch's layer nor ours updates them
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
    """The mean loss of a model over samples in a fixed order, computed in batches.

    Norm layers see one batch at a time, so the batch size changes the value. Nothing is random:
    there is no augmentation.

    Args:
        inputs: all samples, on the device; they may be bytes that ``prepare`` turns into floats.
        labels: one per sample.
        batch: samples per batch; the last batch may be smaller.
        prepare: turns a batch of inputs into the input of the model.
        criterion: returns the sum of losses from outputs and labels; cross-entropy if None.

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
                "use a size that leaves none: a batch of one has no batch statistics",
            )
        self.inputs, self.labels, self.batch = inputs, labels, batch
        self.prepare = prepare or (lambda images: images)
        self.criterion = criterion or _summed_cross_entropy

    def __call__(self, model: nn.Module) -> Tensor:
        """Return the mean in fp64, as a tensor on the device."""
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
    """The losses measured so far, kept in a file if there is one.

    Args:
        path: written at intervals and on exit, also after an error.
        settings: radius, seed, number of weights and loss at the origin; a file with others is
            refused.

    """

    def __init__(self, path: Path | None, settings: dict[str, Any]) -> None:
        self.losses: list[float] = []
        self._path, self._settings = path, settings
        self._written = time.monotonic()
        if path is not None and path.exists():
            self.losses = self._read(path)

    def add(self, loss: float) -> None:
        """Append a loss, and write the file if it is time."""
        self.losses.append(loss)
        if time.monotonic() - self._written > SAVE_SECONDS:
            self._write()

    def __enter__(self) -> "Scan":
        return self

    def __exit__(self, *_: object) -> None:
        """Write the file."""
        self._write()

    def _read(self, path: Path) -> list[float]:
        """Return the losses in a file, after a check that it is of this scan."""
        try:
            saved = json.loads(path.read_text())
            losses = [float(loss) for loss in saved.pop("losses")]
            before, now = saved["origin"], self._settings["origin"]
            same_origin = before == now or abs(before - now) <= 1e-6 * abs(before)
        except (ValueError, TypeError, KeyError, AttributeError):
            raise InputError("resume", f"{path} is not a scan", "name another file") from None
        different = [k for k, v in self._settings.items() if k != "origin" and saved.get(k) != v]
        different += [] if same_origin else ["origin"]
        if different:
            fields = ", ".join(different)
            raise InputError(
                "resume", f"{path} is of another scan (different {fields})", "name another file"
            )
        return losses

    def _write(self) -> None:
        if self._path is None:
            return
        with atomic_file(self._path) as file:
            file.write(json.dumps({**self._settings, "losses": self.losses}).encode())
        self._written = time.monotonic()
