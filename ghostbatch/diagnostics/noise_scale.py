"""The gradient noise scale: the batch size at which the gradient's noise equals its mean.

With G the mean gradient and Sigma the covariance of the gradient of one sample, the squared norm of
the mean gradient over b samples is |G|^2 + tr(Sigma) / b on average. The noise scale is
B_simple = tr(Sigma) / |G|^2 (McCandlish et al., *An empirical model of large-batch training*,
2018): the gradients of batches far below it are mostly noise, and batches far above it waste
samples.

A batch of B samples in K parts of b_k samples, with mean gradients g_k, and g over all, gives

    tr(Sigma) ~ (sum_k b_k |g_k|^2 - B |g|^2) / (K - 1)    and    |G|^2 ~ |g|^2 - tr(Sigma) / B,

both without bias for independent samples. For equal parts these are the paper's (appendix A.1).
They are averaged over updates first and divided then: a mean of ratios would be biased.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, nan
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ghostbatch.diagnostics.distance import as_dtensor
from ghostbatch.diagnostics.ratio import ratio_interval
from ghostbatch.errors import InputError, check_is, check_positive
from ghostbatch.ops.running.groups import name_of, ranks_in, resolve

Gradient = Tensor | Sequence[Tensor] | Mapping[str, Tensor]
"""One tensor, or one for each parameter."""

BLOCKS = 64
"""Largest number of blocks of consecutive updates; where more are needed, they grow."""


@dataclass(frozen=True)
class NoiseScale:
    """An estimate of the gradient noise scale; ``float(scale)`` is its value."""

    value: float
    """tr(Sigma) / |G|^2, in samples; infinite if the estimate of |G|^2 is not above 0."""
    interval: tuple[float, float]
    """Fieller's interval of a ratio of means, by Student's t over blocks of updates.

    Its upper end is infinite if |G|^2 cannot be told from 0. After one update it is (0, inf).
    """
    level: float
    """Probability of the interval."""
    updates: int
    """Updates in the averages; those with a gradient that is not finite do not count."""
    signal: float
    """Mean estimate of |G|^2."""
    noise: float
    """Mean estimate of tr(Sigma)."""

    def __float__(self) -> float:
        return self.value


class GradientNoiseScale:
    """Estimates the gradient noise scale from the gradients of the parts of each batch.

    Parts are micro-batches, the shards of data-parallel ranks, ghosts or samples. Give them in one
    of two ways.

    - Gradients that accumulate in ``.grad``: call `part` after each backward, and `update` before
      clipping and the optimizer's step. At the end ``.grad`` must be proportional to the mean
      gradient over the batch, so weight the losses of unequal parts by their sizes. This keeps a
      copy of the gradients.
    - Gradients that you have, such as one for each ghost: call ``update(parts, samples)``.

    Over data-parallel ranks each rank gives its own parts, and all ranks get the same estimate.
    Call `part` before the gradients are averaged and `update` after it. DDP averages inside the
    backward: give the DDP model here, and the gradients are measured before. An update takes one
    collective of three numbers, and with given parts another one for the gradients.

    Nothing waits for the device, except `estimate` and `state_dict`. Estimates are averages over
    all updates since the start or the last `reset`; the noise scale grows during training, so reset
    now and then.

    Args:
        model: its trainable parameters have the gradients.
        process_group: the ranks that share a batch. None is the default group, if there is one;
            ``gb.LOCAL`` is this rank alone.

    >>> model = nn.Linear(3, 1, bias=False)
    >>> scale = GradientNoiseScale(model)
    >>> for x in torch.randn(4, 64, 3):  # four batches, each in two micro-batches
    ...     model.zero_grad()
    ...     for micro in x.split(32):
    ...         (model(micro).square().mean() / 2).backward()
    ...         scale.part(len(micro))
    ...     scale.update()
    >>> scale.estimate().updates
    4
    >>> scale = GradientNoiseScale(model)
    >>> scale.update([torch.tensor([1.0]), torch.tensor([3.0])], samples=1)
    >>> found = scale.estimate()
    >>> found.noise, found.signal  # the variance of 1 and 3, and 2^2 - 2 / 2
    (2.0, 3.0)

    """

    def __init__(
        self, model: nn.Module, *, process_group: "dist.ProcessGroup | str | None" = None
    ) -> None:
        check_is("model", model, nn.Module, "a torch.nn.Module")
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        if not self._parameters:
            raise InputError("model", "has no trainable parameters", "set requires_grad")
        if any(as_dtensor(p) is not None for p in self._parameters):
            remedy = "measure it on one rank, or under DDP"
            raise InputError("model", "its gradients are sharded over ranks", remedy)
        self._group = name_of(process_group)
        self._before: dict[Tensor, Tensor] = {}
        """The gradients when the last part was noted."""
        self._growth: Tensor | None = None
        """With DDP, the squared norm of what a backward has added, before it is averaged."""
        self._noted: list[Tensor] = []
        """The `_totals` of each part of this batch."""
        if isinstance(model, DistributedDataParallel):
            for parameter in self._parameters:
                parameter.register_post_accumulate_grad_hook(self._note_growth)
        self.reset()

    def reset(self) -> None:
        """Start new averages."""
        self._sums: Tensor | None = None
        """For each block: updates, and the sums of their estimates of |G|^2 and tr(Sigma)."""
        self._length, self._done = 1, 0
        """Updates in a block, and in all."""

    @torch.no_grad()
    def part(self, samples: int) -> None:
        """Note what the gradients have gained since the last part, from ``samples`` samples."""
        check_positive(samples=samples)
        gradients = self._gradients()
        if self._growth is None:
            self._growth = _square([self._gain(p, g) for p, g in gradients.items()])
        self._noted.append(_totals(self._growth, samples))
        self._growth = None
        self._before = {p: g.clone() for p, g in gradients.items()}

    @torch.no_grad()
    def update(
        self,
        parts: Iterable[Gradient] | None = None,
        samples: int | Sequence[int] | None = None,
    ) -> None:
        """Add the estimates of one batch to the averages.

        Args:
            parts: the mean gradient over each part of the batch; None if `part` has noted them.
            samples: the number of samples of each part, or a single number if all are equal.

        """
        if parts is None:
            noted, whole = self._noted, list(self._gradients().values())
            self._noted, self._before = [], {}
        else:
            noted, whole = self._weigh(parts, samples)
        self._check(noted)
        count, batch, squares = self._over_ranks(torch.stack(noted).sum(0)).unbind()
        square = _square(whole)
        if parts is None:  # averaged over ranks
            squares = squares / ranks_in(self._group) ** 2
        else:  # summed over samples
            squares, square = squares / batch**2, square / batch**2
        noise = batch * (batch * squares - square) / (count - 1)
        self._add(square - noise / batch, noise)

    def estimate(self, level: float = 0.95) -> NoiseScale:
        """Return the estimate from all updates so far, with an interval; waits for the device."""
        if not 0 < level < 1:
            raise InputError("level", f"{level} is not between 0 and 1", "use 0.95")
        rows = [] if self._sums is None else self._sums.tolist()
        blocks = np.array([row for row in rows if row[0]], dtype=float).reshape(-1, 3)
        updates, signal, noise = blocks.sum(0).tolist()
        if not updates:
            return NoiseScale(nan, (0.0, inf), level, 0, nan, nan)
        return NoiseScale(
            value=noise / signal if signal > 0 else inf if noise > 0 else nan,
            interval=ratio_interval(blocks, level),
            level=level,
            updates=int(updates),
            signal=signal / updates,
            noise=noise / updates,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the averages as plain numbers; call it between two updates."""
        sums = None if self._sums is None else self._sums.tolist()
        return {"sums": sums, "length": self._length, "done": self._done}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue with the averages of ``state_dict``."""
        if missing := {"sums", "length", "done"} - state_dict.keys():
            problem = f"it has no {', '.join(sorted(missing))}"
            raise InputError("state_dict", problem, "load what state_dict returned")
        sums, device = state_dict["sums"], self._parameters[0].device
        self._length, self._done = state_dict["length"], state_dict["done"]
        self._sums = None if sums is None else torch.tensor(sums, dtype=torch.float64).to(device)

    def _gradients(self) -> dict[Tensor, Tensor]:
        found: dict[Tensor, Tensor] = {p: p.grad for p in self._parameters if p.grad is not None}
        if not found:
            raise InputError("model", "has no gradients", "call backward first")
        return found

    def _gain(self, parameter: Tensor, gradient: Tensor) -> Tensor:
        """Return what has been added to a parameter's gradient since the last part."""
        return gradient - self._before[parameter] if parameter in self._before else gradient

    @torch.no_grad()
    def _note_growth(self, parameter: Tensor) -> None:
        """Add a parameter's gradient to the squared norm of this part, before DDP averages it."""
        assert parameter.grad is not None  # noqa: S101 (PyTorch calls this after it is set)
        square = _square([self._gain(parameter, parameter.grad)])
        self._growth = square if self._growth is None else self._growth + square

    def _weigh(
        self, parts: Iterable[Gradient], samples: int | Sequence[int] | None
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return the `_totals` of each part's summed gradient, and their sum over all ranks."""
        gradients = list(map(_vector, parts))
        if len({len(gradient) for gradient in gradients}) > 1:
            problem = "they have different numbers of values"
            raise InputError("parts", problem, "give the whole gradient of each part")
        sizes: list[Any] = [samples] * len(gradients)
        if isinstance(samples, Sequence):
            sizes = list(samples)
        if len(sizes) != len(gradients) or not gradients:
            problem = f"{len(sizes)} numbers for {len(gradients)} parts"
            raise InputError("samples", problem, "give one for each part, or one for all")
        for size in sizes:
            check_positive(samples=size)
        summed = [size * gradient for size, gradient in zip(sizes, gradients, strict=True)]
        noted = [_totals(_square([each]), n) for each, n in zip(summed, sizes, strict=True)]
        return noted, [self._over_ranks(torch.stack(summed).sum(0))]

    def _check(self, noted: Sequence[Tensor]) -> None:
        if not noted:
            remedy = "call part(samples) after each backward, or give the parts"
            raise InputError("parts", "none were noted since the last update", remedy)
        if len(noted) == 1 and ranks_in(self._group) == 1:
            remedy = "cut the batch into two or more"
            raise InputError("parts", "a single part does not show the noise", remedy)

    def _over_ranks(self, values: Tensor) -> Tensor:
        """Return the sum over the ranks; ``values`` may be overwritten."""
        if ranks_in(self._group) > 1:
            dist.all_reduce(values, group=resolve(self._group))
        return values

    def _add(self, signal: Tensor, noise: Tensor) -> None:
        """Add the estimates of one update to the last block, if they are finite."""
        if self._sums is None:
            self._sums = noise.new_zeros(BLOCKS, 3)
        if self._done == BLOCKS * self._length:
            merged = self._sums.view(-1, 2, 3).sum(1)
            self._sums, self._length = torch.cat([merged, 0 * merged]), 2 * self._length
        values = torch.stack([torch.ones_like(noise), signal, noise])
        self._sums[self._done // self._length] += torch.where(values.isfinite().all(), values, 0.0)
        self._done += 1


def _vector(gradient: Gradient) -> Tensor:
    """Return a gradient as one vector."""
    if isinstance(gradient, Tensor):
        return gradient.flatten()
    check_is("parts", gradient, (Mapping, Sequence), "a tensor, a list or a dictionary of tensors")
    tensors = list(gradient.values() if isinstance(gradient, Mapping) else gradient)
    for tensor in tensors:
        check_is("parts", tensor, Tensor, "a tensor")
    return torch.cat([tensor.flatten() for tensor in tensors])


def _square(tensors: Sequence[Tensor]) -> Tensor:
    """Return the sum of squares in fp64, on the device of the first tensor."""
    wide = [t.to(torch.promote_types(t.dtype, torch.float32)) for t in tensors]
    norms = [norm.to(wide[0].device) for norm in torch._foreach_norm(wide)]
    return torch.stack(norms).double().square().sum()


def _totals(square: Tensor, samples: int) -> Tensor:
    """Return for one part: 1, its samples, and a squared norm over its samples."""
    one = torch.ones_like(square)
    return torch.stack([one, samples * one, square / samples])
