"""How a loss is measured around given weights: random steps, batch statistics, data, a file."""

import json
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import reduce
from math import isclose
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ghostbatch.diagnostics.distance import as_dtensor
from ghostbatch.errors import InputError, check_is
from ghostbatch.files import atomic_file
from ghostbatch.nn import to_ghost, to_plain
from ghostbatch.nn.keep import kept_buffers
from ghostbatch.ops import LOCAL
from ghostbatch.ops.backends.select import has_kernels
from ghostbatch.optim.groups import wide_dtype

PLAIN = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)

ANY_BATCH = 1 << 40
"""A ghost size above that of any batch."""

SAVE_SECONDS = 10.0
"""Seconds between writes of a scan's file."""


@contextmanager
def random_steps(model: nn.Module) -> Iterator[Callable[[float, int], None]]:
    """Yield a function that moves the trainable weights to a distance, in the direction of a seed.

    Directions are uniform on the sphere. On exit weights and buffers are restored bit for bit. Use
    it under ``torch.no_grad``.
    """
    weights = trainable(model)
    sizes = [w.numel() for w in weights]
    dtype = reduce(torch.promote_types, (w.dtype for w in weights), torch.float32)
    generator = torch.Generator(weights[0].device)
    direction = torch.empty(sum(sizes), device=generator.device, dtype=dtype)
    with unchanged(model) as copies:
        start = [copies[w] for w in weights]
        # Parts of it in the layouts of the weights, so that adding them is one kernel.
        parts = zip(direction.split(sizes), start, strict=True)
        steps = [part.as_strided(like.shape, like.stride()) for part, like in parts]

        def move(distance: float, seed: int) -> None:
            direction.normal_(generator=generator.manual_seed(seed))
            direction.mul_(distance / torch.linalg.vector_norm(direction))
            torch._foreach_copy_(weights, start)
            moves = [s.to(w.dtype) for s, w in zip(steps, weights, strict=True)]
            torch._foreach_add_(weights, moves)

        yield move


def trainable(model: nn.Module) -> list[Tensor]:
    """Return the trainable weights; refuse a model without any, or with some on other devices."""
    check_is("model", model, nn.Module, "a torch.nn.Module")
    weights: list[Tensor] = [p for p in model.parameters() if p.requires_grad]
    if not weights:
        raise InputError("model", "has no trainable parameters", "set requires_grad")
    if len({w.device for w in weights}) > 1 or as_dtensor(weights[0]) is not None:
        raise InputError("model", "its weights are not on one device", "move them to one")
    return weights


@contextmanager
def unchanged(model: nn.Module) -> Iterator[dict[Tensor, Tensor]]:
    """Yield a copy of each parameter; restore parameters and buffers bit for bit on exit."""
    copies: dict[Tensor, Tensor] = {p: p.detach().clone() for p in model.parameters()}
    with kept_buffers(model):
        try:
            yield copies
        finally:
            with torch.no_grad():
                for parameter, copy in copies.items():
                    parameter.copy_(copy)


@contextmanager
def untracked(model: nn.Module) -> Iterator[None]:
    """Keep batch norms from updating their running statistics."""
    tracking = {m: m.track_running_stats for m in model.modules() if isinstance(m, _BatchNorm)}
    try:
        for norm in tracking:
            norm.track_running_stats = False  # then neither PyTorch's layer nor ours updates them
        yield
    finally:
        for norm, track in tracking.items():
            norm.track_running_stats = track


@contextmanager
def evaluation_mode(model: nn.Module, but: Collection[nn.Module] = ()) -> Iterator[None]:
    """Put the model into evaluation mode, ``but`` some layers into training mode; undo it."""
    modes = {module: module.training for module in model.modules()}
    try:
        for module in modes:
            module.training = module in but
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


@contextmanager
def batch_statistics(model: nn.Module) -> Iterator[None]:
    """Put the model into evaluation mode, but let batch norms use batch statistics."""
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    # With kernels, a ghost norm with one ghost per batch is the same function and much faster.
    plain = [m for m in norms if type(m) in PLAIN and m.affine and has_kernels(m.weight)]
    with evaluation_mode(model, but=norms):
        try:
            for norm in plain:
                to_ghost(norm, ANY_BATCH, process_group=LOCAL)
            with untracked(model):
                yield
        finally:
            for norm in plain:
                to_plain(norm)


class BatchedLoss:
    """The mean loss of a model over samples in a fixed order, computed in batches.

    Norm layers see one batch at a time, so the batch size changes the value. Nothing is random:
    there is no augmentation.

    Args:
        inputs: all samples, on the device; they may be bytes that ``prepare`` turns into floats.
        labels: one per sample.
        batch: samples per batch; the last batch may be smaller.
        prepare: turns a batch of inputs into the input of the model.
        criterion: returns the sum of losses, given outputs and labels; cross-entropy if None.

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
        count = len(labels)
        if len(inputs) != count or not count:
            raise InputError("labels", f"{count} for {len(inputs)} inputs", "give one for each")
        if batch < 1 or (count % batch == 1 and batch > 1):
            problem = f"{batch} leaves {count % max(1, batch)} of {count} samples"
            remedy = "use a size that leaves none: a batch of one has no batch statistics"
            raise InputError("batch", problem, remedy)
        self.inputs, self.labels, self.batch = inputs, labels, batch
        self.prepare = prepare or (lambda images: images)
        self.criterion = criterion or _summed_cross_entropy

    def __call__(self, model: nn.Module) -> Tensor:
        """Return the mean in fp64, as a tensor on the device."""
        total = torch.zeros((), dtype=torch.float64, device=self.labels.device)
        batches = zip(self.inputs.split(self.batch), self.labels.split(self.batch), strict=True)
        for images, labels in batches:
            total += self.criterion(model(self.prepare(images)), labels)
        return total / len(self.labels)


def _summed_cross_entropy(outputs: Tensor, labels: Tensor) -> Tensor:
    wide = outputs.to(wide_dtype(outputs))
    return F.cross_entropy(wide, labels, reduction="none").sum(dtype=torch.float64)


class Scan:
    """The losses measured so far, kept in a file if there is one.

    Args:
        path: written at intervals while losses are added; read at the start if it exists.
        settings: radius, seed, number of weights and loss at the origin; a file with others is
            refused.

    """

    def __init__(self, path: Path | None, settings: dict[str, Any]) -> None:
        self._path, self._settings, self._written = path, settings, time.monotonic()
        self.losses = self._read(path) if path is not None and path.exists() else []

    def add(self, loss: float) -> None:
        """Append a loss, and write the file if it is time."""
        self.losses.append(loss)
        if time.monotonic() - self._written > SAVE_SECONDS:
            self.write()

    def write(self) -> None:
        """Write the file, if there is one."""
        if self._path is not None:
            with atomic_file(self._path) as file:
                file.write(json.dumps({**self._settings, "losses": self.losses}).encode())
            self._written = time.monotonic()

    def _read(self, path: Path) -> list[float]:
        """Return the losses in a file, after a check that it is of this scan."""
        try:
            saved = json.loads(path.read_text())
            losses = [float(loss) for loss in saved["losses"]]
            if isclose(saved["origin"], self._settings["origin"], rel_tol=1e-6):
                saved["origin"] = self._settings["origin"]
        except (OSError, ValueError, TypeError, KeyError):
            raise InputError("resume", f"{path} is not a scan", "name another file") from None
        if different := ", ".join(k for k, v in self._settings.items() if saved.get(k) != v):
            problem = f"{path} is of another scan (different {different})"
            raise InputError("resume", problem, "name another file")
        return losses
