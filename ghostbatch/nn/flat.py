"""All weights of a model in one buffer, so that few kernels cast, clip and step them.

Convolutions and linear layers read copies of their weights in a lower precision, in the order that
each layer computes with (see `ghostbatch.nn.fold`). The copies lie in one buffer, which one kernel
writes. Tensors with 4 dimensions lie channels_last in every buffer.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor, nn
from torch.func import functional_call

from ghostbatch.nn.fold import FoldedConv2d, PatchConv2d
from ghostbatch.ops.backends.base import on_device
from ghostbatch.ops.flat import collect_kernel, judge_kernel, place_kernel, step_kernel

BLOCK = 1024
"""Values of a program."""

ALIGN = 64
"""Values to which the start of each tensor is rounded up, for aligned loads."""


@dataclass
class Leaf:
    """A parameter, and what the network reads in its place: a copy, or itself."""

    name: str
    parameter: Tensor
    shape: torch.Size
    """Of what the network reads."""
    sources: Tensor | None
    """For each value of the copy, the index of its value in the parameter, or -1 for zero; both in
    memory order. None: the same values in the same order."""
    is_copy: bool
    tensor: Tensor
    """What the network reads; a copy's is set when there is a buffer for it."""
    weight_start: int = 0
    """Where the parameter begins among the weights."""
    leaf_start: int = 0
    """Where the leaf begins among the leaves; copies come first."""


class FlatWeights:
    """The weights of a model, their gradients and momentum, in flat buffers on one GPU.

    The parameters stay the same objects; their data become views of one buffer. Call `refresh`
    after changing them from outside.

    Args:
        model: a network whose layers are called once each, under autocast, and all of whose
            parameters get a gradient, such as those of `MODELS`.
        dtype: of the copies that convolutions and linear layers read.
        undecayed: parameters without weight decay; they lie behind the others.

    """

    def __init__(
        self, model: nn.Module, dtype: torch.dtype, undecayed: Iterable[Tensor] = ()
    ) -> None:
        self.model = model
        self._leaves = sorted(_leaves(model), key=lambda leaf: not leaf.is_copy)
        total = _line_up(self._leaves, {id(weight) for weight in undecayed})
        self._decayed = total.decayed
        device = next(model.parameters()).device
        # A checkpoint holds whole buffers, so each is one of its own.
        self._weights, self._grads, self._momentum = (
            torch.zeros(total.weights, device=device) for _ in range(3)
        )
        self._copies = torch.zeros(total.copies, dtype=dtype, device=device)
        self._leaf_grads = torch.zeros(total.leaves, device=device)
        sources, targets = _tables(self._leaves, total)
        self._sources, self._targets = sources.to(device), targets.to(device)
        for leaf in self._leaves:
            weight, start = leaf.parameter, leaf.weight_start
            weight.data = _view(self._weights, start, weight.shape).copy_(weight.detach())
            if leaf.is_copy:
                leaf.tensor = _view(self._copies, leaf.leaf_start, leaf.shape).requires_grad_()
        self._partials = torch.zeros(triton.cdiv(total.weights, BLOCK), device=device)
        self._norm = torch.zeros((), dtype=torch.float64, device=device)
        self.refresh()

    def __call__(self, x: Tensor) -> Tensor:
        """Return ``model(x)``, computed with the copies; call it under autocast."""
        copies = {leaf.name: leaf.tensor for leaf in self._leaves if leaf.is_copy}
        return functional_call(self.model, copies, (x,))  # type: ignore[no-any-return]

    def momentum(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each parameter and its momentum, a view of the buffer that `step` uses."""
        for leaf in self._leaves:
            yield leaf.parameter, _view(self._momentum, leaf.weight_start, leaf.parameter.shape)

    def refresh(self) -> None:
        """Write the copies anew."""
        if total := len(self._copies):
            self._launch(place_kernel, total, self._weights, self._sources, self._copies, total)

    def take_gradients(self, *, add: bool) -> None:
        """Take over the gradients that a backward left; ``add`` them to those of an earlier one."""
        for is_copy in (True, False):  # PyTorch's foreach functions want one dtype
            leaves = [leaf for leaf in self._leaves if leaf.is_copy == is_copy]
            if not leaves:
                continue
            ours = [self._leaf_grads[leaf.leaf_start :][: leaf.shape.numel()] for leaf in leaves]
            given = [_row(leaf.tensor.grad) for leaf in leaves]  # type: ignore[arg-type]
            (torch._foreach_add_ if add else torch._foreach_copy_)(ours, given)
            for leaf in leaves:
                leaf.tensor.grad = None

    def show_gradients(self) -> None:
        """Set the ``grad`` of every parameter to what was taken over, for a diagnosis."""
        self._collect()
        for leaf in self._leaves:
            leaf.parameter.grad = _view(self._grads, leaf.weight_start, leaf.parameter.shape)

    def _collect(self) -> None:
        """Write the gradients of the weights, and sums of their squares."""
        total = len(self._weights)
        self._launch(
            *(collect_kernel, total),
            *(self._leaf_grads, self._targets, self._grads, self._partials, total),
            COPIES=len(self._targets),
        )

    def step(
        self,
        sums: Tensor,
        numbers: Tensor,
        diverged: Tensor,
        lr: Tensor,
        *,
        batch: int,
        far: float,
        patience: int,
        clip: float,
        momentum: float,
        weight_decay: float,
        nesterov: bool = False,
    ) -> None:
        """Judge an update; unless it has diverged, clip its gradient and do a step of SGD.

        Args:
            sums: (3,) float64: the batch's loss, correct answers and requests to stop.
            numbers: of the monitor, see `judge_kernel`, which changes them.
            diverged: of the monitor.
            lr: learning rate, on the device, so that a CUDA graph can be replayed with another one.
            batch: samples of the batch.
            far: a loss above this multiple of the first one is far above it.
            patience: consecutive updates with such a loss that count as divergence.
            clip: largest L2 norm of the gradient.
            momentum: factor of the last step's velocity.
            weight_decay: factor of the weights that is added to the clipped gradient, except for
                undecayed ones.
            nesterov: use Nesterov's momentum.

        """
        total = len(self._weights)
        self._collect()
        self._launch(
            *(judge_kernel, 1),
            *(sums, self._partials, self._norm, numbers, diverged, len(self._partials)),
            *(batch, clip, far, patience),
        )
        self._launch(
            *(step_kernel, total),
            *(self._weights, self._momentum, self._grads, self._norm, lr, diverged),
            *(total, self._decayed, clip, momentum, weight_decay),
            NESTEROV=nesterov,
        )
        self.refresh()

    def _launch(self, kernel: Any, values: int, *arguments: Any, **constants: Any) -> None:
        """Launch as many programs of a kernel as this many values need."""
        with on_device(self._weights.device):
            kernel[(triton.cdiv(values, BLOCK),)](*arguments, **constants, B=BLOCK)


def _leaves(model: nn.Module) -> Iterator[Leaf]:
    """Yield a leaf for each parameter; those of convolutions and linear layers are copies."""
    for prefix, layer in model.named_modules():
        is_copy = type(layer) in (nn.Linear, nn.Conv2d, FoldedConv2d, PatchConv2d)
        for name, weight in layer.named_parameters(prefix, recurse=False):
            shape, sources = weight.shape, None
            if isinstance(layer, FoldedConv2d | PatchConv2d) and weight is layer.weight:
                # The numbers from 1 on, so that what the layer adds can be told from them.
                numbers = torch.arange(1.0, weight.numel() + 1, dtype=torch.float64)
                placed = layer.placed(_view(numbers, 0, weight.shape))
                shape, sources = placed.shape, _row(placed).long() - 1
            yield Leaf(name, weight, shape, sources, is_copy, weight)


class Total(NamedTuple):
    """Sizes of the buffers."""

    weights: int
    decayed: int
    """Number of the weights that decay; they come first."""
    leaves: int
    copies: int


def _line_up(leaves: Sequence[Leaf], undecayed: Collection[int]) -> Total:
    """Set where each leaf and its parameter begin; return the sizes of the buffers.

    Parameters whose ids are among ``undecayed`` come after all others.
    """
    weights = decayed = total = copies = 0
    for leaf in leaves:
        leaf.leaf_start = total
        total += -(-leaf.shape.numel() // ALIGN) * ALIGN
        copies = total if leaf.is_copy else copies
    for leaf in sorted(leaves, key=lambda leaf: id(leaf.parameter) in undecayed):
        leaf.weight_start = weights
        weights += -(-leaf.parameter.numel() // ALIGN) * ALIGN
        decayed = decayed if id(leaf.parameter) in undecayed else weights
    return Total(weights, decayed, total, copies)


def _tables(leaves: Sequence[Leaf], total: Total) -> tuple[Tensor, Tensor]:
    """Return the index of each copy's weight, and the indices of each weight's leaves, as int32.

    Their shapes are (copies,), and (most leaves of a weight, weights). An index of -1 is none.
    """
    sources = torch.full((total.leaves,), -1, dtype=torch.int32)
    targets = [torch.full((total.weights,), -1, dtype=torch.int32)]
    for leaf in leaves:
        own, at, start = leaf.sources, leaf.leaf_start, leaf.weight_start
        if own is None:
            count = leaf.parameter.numel()
            sources[at:][:count] = torch.arange(start, start + count)
            targets[0][start:][:count] = torch.arange(at, at + count)
            continue
        sources[at:][: len(own)] = torch.where(own < 0, -1, own + start)
        used = (own >= 0).nonzero().squeeze(1)
        weights, order = own[used].sort(stable=True)
        rank = torch.arange(len(weights)) - torch.searchsorted(weights, weights)
        for copy in range(int(rank.max()) + 1):
            if copy == len(targets):
                targets.append(torch.full_like(targets[0], -1))
            which = rank == copy
            targets[copy][start + weights[which]] = (used[order][which] + at).int()
    return sources[: total.copies], torch.stack(targets)


def _view(buffer: Tensor, start: int, shape: torch.Size) -> Tensor:
    """Return a part of a buffer in this shape."""
    row = buffer[start : start + shape.numel()]
    if len(shape) != 4:
        return row.view(shape)
    return row.view(shape[0], *shape[2:], shape[1]).permute(0, 3, 1, 2)


def _row(tensor: Tensor) -> Tensor:
    """Return the values of a tensor in memory order."""
    return (tensor.permute(0, 2, 3, 1) if tensor.dim() == 4 else tensor).reshape(-1)
