"""All weights in one buffer: cast and unfolded together, clipped and stepped by two kernels.

Parameters become views of one fp32 buffer of three sections:

    folded    weights of folded convolutions, which the network reads in another order, some twice
    copied    other weights and biases of convolutions and linear layers
    plain     everything else (norms), which the network reads in fp32

The network reads the first two from a second buffer in bf16, the shadow. `Flat.step` takes the
gradients of the shadow, sums the copies of folded weights, clips by the norm of all gradients and
does SGD with momentum; unless loss and norm are finite, nothing changes. Rates are read from device
memory, sums are in a fixed order, and the host never waits: one CUDA graph can hold it all.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from fold import ColumnConv2d, FoldedConv2d, remove_hooks
from torch import Tensor, nn

BLOCK = 4096
Folded = FoldedConv2d | ColumnConv2d
ALIGN = 64
"""Values to which a weight's start is rounded up, for aligned loads."""


# ----------------------------------------------------------------------------------------- kernels


@triton.jit
def collect_kernel(
    shadow_grad_ptr,  # like the shadow
    grad_ptr,  # like the parameters; the plain section is already there
    targets_ptr,  # (COPIES, folded): where in the shadow the copies are; -1: no more
    partials_ptr,  # (programs,): sums of squares
    folded,  # ends of the sections, multiples of BLOCK
    copied,
    shadow_folded,  # end of the folded section in the shadow
    COPIES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the gradients of the parameters, given those of the shadow, and sum their squares."""
    start = tl.program_id(0) * BLOCK
    at = start + tl.arange(0, BLOCK)
    grad = tl.zeros((BLOCK,), tl.float32)
    if start < folded:
        for copy in tl.static_range(COPIES):
            target = tl.load(targets_ptr + copy * folded + at)
            grad += tl.load(shadow_grad_ptr + target, target >= 0, other=0.0).to(tl.float32)
        tl.store(grad_ptr + at, grad)
    elif start < copied:
        grad += tl.load(shadow_grad_ptr + (shadow_folded - folded) + at).to(tl.float32)
        tl.store(grad_ptr + at, grad)
    else:
        grad += tl.load(grad_ptr + at)
    tl.store(partials_ptr + tl.program_id(0), tl.sum(grad * grad))


@triton.jit
def step_kernel(
    weight_ptr,
    momentum_ptr,
    grad_ptr,
    shadow_ptr,
    partials_ptr,  # (programs,): sums of squares
    rates_ptr,  # lr, momentum, weight decay, largest gradient norm
    loss_ptr,
    sums_ptr,  # gradient norm, clipped, skipped: added to
    programs,
    folded,
    copied,
    shadow_folded,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Clip and do one step of SGD with momentum, unless the loss or the norm is not finite."""
    start = tl.program_id(0) * BLOCK
    at = start + tl.arange(0, BLOCK)
    weight = tl.load(weight_ptr + at)
    velocity = tl.load(momentum_ptr + at)
    grad = tl.load(grad_ptr + at)
    squares = tl.zeros((CHUNK,), tl.float32)
    for first in range(0, programs, CHUNK):
        part = first + tl.arange(0, CHUNK)
        squares += tl.load(partials_ptr + part, part < programs, other=0.0)
    norm = tl.sqrt_rn(tl.sum(squares))
    lr = tl.load(rates_ptr)
    momentum = tl.load(rates_ptr + 1)
    decay = tl.load(rates_ptr + 2)
    most = tl.load(rates_ptr + 3)
    loss = tl.load(loss_ptr)
    finite = (norm < float("inf")) & (tl.abs(loss) < float("inf"))
    if finite:
        grad = grad * tl.minimum(most / (norm + 1e-6), 1.0) + decay * weight
        velocity = momentum * velocity + grad
        weight -= lr * velocity
        tl.store(momentum_ptr + at, velocity)
        tl.store(weight_ptr + at, weight)
        if (start >= folded) & (start < copied):
            cast = weight.to(shadow_ptr.dtype.element_ty)
            tl.store(shadow_ptr + (shadow_folded - folded) + at, cast)
    if start == 0:
        tl.store(sums_ptr, tl.load(sums_ptr) + tl.where(finite, norm, 0.0))
        clipped = finite & (norm > most)
        tl.store(sums_ptr + 1, tl.load(sums_ptr + 1) + tl.where(clipped, 1.0, 0.0))
        tl.store(sums_ptr + 2, tl.load(sums_ptr + 2) + tl.where(finite, 0.0, 1.0))


@triton.jit
def unfold_kernel(weight_ptr, shadow_ptr, sources_ptr, BLOCK: tl.constexpr):
    """Write the folded section of the shadow: a weight at each of its places, zeros elsewhere."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    source = tl.load(sources_ptr + at)
    weight = tl.load(weight_ptr + source, source >= 0, other=0.0)
    tl.store(shadow_ptr + at, weight.to(shadow_ptr.dtype.element_ty))


# ------------------------------------------------------------------------------------------ layers


class ShadowConv2d(nn.Conv2d):
    """nn.Conv2d that reads the shadow."""

    shadow: Tensor
    shadow_bias: Tensor | None

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (nn.Conv2d's name for it)
        """From (N, I, H, W) to (N, O, ...)."""
        return F.conv2d(
            input, self.shadow, self.shadow_bias, self.stride, self.padding, self.dilation
        )


class ShadowLinear(nn.Linear):
    """nn.Linear that reads the shadow."""

    shadow: Tensor
    shadow_bias: Tensor | None

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (nn.Linear's name for it)
        """From (N, I) to (N, O)."""
        return F.linear(input, self.shadow, self.shadow_bias)


# ------------------------------------------------------------------------------------- the buffers


@dataclass
class Slot:
    """A parameter and the stretches of the buffers that belong to it."""

    parameter: Tensor
    start: int
    leaf: Tensor
    """What the network reads and autograd differentiates: a part of the shadow, or itself."""
    grad: Tensor
    """Where the gradient of the leaf goes, as one row."""


class Flat:
    """The weights of a model in one buffer, with gradients, momentum and a shadow.

    The model reads the shadow from now on; its parameters stay the same objects.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype = torch.bfloat16) -> None:
        remove_hooks(model)  # the folded weights come from the shadow
        folded, copied, plain = _sections(model)
        device = next(model.parameters()).device
        self._ends, starts = _layout(
            [[layer.weight for layer in folded], [p for _, p in copied], plain]
        )
        total = self._ends[2]
        self.weights, self.grads, self.momentum = (
            torch.zeros(total, device=device) for _ in range(3)
        )
        places = [_places(layer, starts[layer.weight]) for layer in folded]
        shadow_starts, shadow_size = _run_together([len(p) for p in places])
        self._shadow_folded = _up(shadow_size, BLOCK)
        size = self._shadow_folded + self._ends[1] - self._ends[0]
        self.shadow, self.shadow_grads = (
            torch.zeros(size, dtype=dtype, device=device) for _ in range(2)
        )
        sources = torch.full((self._shadow_folded,), -1, dtype=torch.int32)
        for begin, place in zip(shadow_starts, places, strict=True):
            sources[begin : begin + len(place)] = place
        self._sources = sources.to(device)
        self._targets = _targets(sources, self._ends[0]).to(device)
        programs = total // BLOCK
        self._partials = torch.zeros(programs, device=device)
        self.slots = [
            *(self._folded_slot(*pair) for pair in zip(folded, shadow_starts, strict=True)),
            *(self._copied_slot(layer, p, starts[p]) for layer, p in copied),
            *(self._plain_slot(p, starts[p]) for p in plain),
        ]
        for number, slot in enumerate(self.slots):
            parameter = slot.parameter
            self._move_in(parameter, starts[parameter], folded=number < len(folded))
        self.refresh()

    def refresh(self) -> None:
        """Write the whole shadow anew, after the parameters were changed from outside."""
        first, second = self._ends[:2]
        self.shadow[self._shadow_folded :].copy_(self.weights[first:second])
        self.unfold()

    def unfold(self) -> None:
        """Write the folded section of the shadow."""
        if self._shadow_folded:
            unfold_kernel[(self._shadow_folded // BLOCK,)](
                self.weights, self.shadow, self._sources, BLOCK=BLOCK, num_warps=8
            )

    @property
    def leaves(self) -> list[Tensor]:
        """Return what to differentiate the loss by."""
        return [slot.leaf for slot in self.slots]

    def step(self, gradients: Sequence[Tensor], rates: Tensor, loss: Tensor, sums: Tensor) -> None:
        """Do one step of SGD, given the gradients of `leaves`; add to norm, clipped, skipped."""
        rows = [_row(g, slot.leaf) for g, slot in zip(gradients, self.slots, strict=True)]
        for plain in (False, True):
            pairs = [
                (slot.grad, row)
                for slot, row in zip(self.slots, rows, strict=True)
                if (slot.leaf is slot.parameter) == plain
            ]
            torch._foreach_copy_([grad for grad, _ in pairs], [row for _, row in pairs])
        programs = len(self._partials)
        sections = (*self._ends[:2], self._shadow_folded)
        collect_kernel[(programs,)](
            self.shadow_grads, self.grads, self._targets, self._partials, *sections,
            COPIES=len(self._targets), BLOCK=BLOCK, num_warps=8,
        )  # fmt: skip
        step_kernel[(programs,)](
            self.weights, self.momentum, self.grads, self.shadow, self._partials,
            rates, loss, sums, programs, *sections,
            BLOCK=BLOCK, CHUNK=1024, num_warps=8,
        )  # fmt: skip
        self.unfold()

    def _move_in(self, parameter: Tensor, start: int, *, folded: bool) -> None:
        """Make a parameter a view of the buffer; whole convolutions lie channels last in it."""
        place = self.weights[start : start + parameter.numel()]
        place = place.view(parameter.shape) if folded else _shaped(place, parameter.shape)
        place.copy_(parameter.detach())
        parameter.data = place

    def _folded_slot(self, layer: Folded, start: int) -> Slot:
        if layer.bias is not None:
            raise NotImplementedError("bias: a folded convolution has one; leave it unfolded")
        with torch.no_grad():
            like = layer.placed(layer.weight)
        place = slice(start, start + like.numel())
        leaf = _shaped(self.shadow[place], like.shape).requires_grad_()
        layer.folded = leaf
        return Slot(layer.weight, start, leaf, self.shadow_grads[place])

    def _copied_slot(self, layer: nn.Module, parameter: Tensor, start: int) -> Slot:
        start += self._shadow_folded - self._ends[0]
        place = slice(start, start + parameter.numel())
        leaf = _shaped(self.shadow[place], parameter.shape).requires_grad_()
        layer.__class__ = ShadowLinear if isinstance(layer, nn.Linear) else ShadowConv2d
        if parameter is layer.weight:
            layer.shadow = leaf
            layer.__dict__.setdefault("shadow_bias", None)
        else:
            layer.shadow_bias = leaf
        return Slot(parameter, start, leaf, self.shadow_grads[place])

    def _plain_slot(self, parameter: Tensor, start: int) -> Slot:
        place = slice(start, start + parameter.numel())
        return Slot(parameter, start, parameter, self.grads[place])


def _sections(
    model: nn.Module,
) -> tuple[list[Folded], list[tuple[nn.Module, nn.Parameter]], list[nn.Parameter]]:
    """Return folded layers, other layers with their weights and biases, and all other weights."""
    folded = [m for m in model.modules() if isinstance(m, Folded)]
    layers = [m for m in model.modules() if type(m) in (nn.Conv2d, nn.Linear)]
    copied = [(layer, p) for layer in layers for p in layer.parameters(recurse=False)]
    known = {layer.weight for layer in folded} | {p for _, p in copied}
    return folded, copied, [p for p in model.parameters() if p not in known]


def _layout(sections: Sequence[Sequence[Tensor]]) -> tuple[list[int], dict[Tensor, int]]:
    """Return the ends of the sections, multiples of BLOCK, and where every parameter starts."""
    ends: list[int] = []
    starts: dict[Tensor, int] = {}
    for parameters in sections:
        begin = ends[-1] if ends else 0
        offsets, size = _run_together([p.numel() for p in parameters])
        starts |= {p: begin + offset for p, offset in zip(parameters, offsets, strict=True)}
        ends.append(_up(begin + size, BLOCK))
    return ends, starts


def _run_together(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Return aligned starts of stretches one after another, and where the last one ends."""
    starts, end = [], 0
    for size in sizes:
        starts.append(end)
        end = _up(end + size, ALIGN)
    return starts, end


def _up(size: int, step: int) -> int:
    return -(-size // step) * step


def _places(layer: Folded, start: int) -> Tensor:
    """Return for every value of the folded weight where in the buffer it comes from, or -1."""
    numbers = torch.arange(1, layer.weight.numel() + 1, dtype=torch.float64)
    placed = layer.placed(numbers.view(layer.weight.shape))
    found = placed.permute(0, 2, 3, 1).reshape(-1).round().to(torch.int32) - 1
    return torch.where(found >= 0, found + start, -1)


def _targets(sources: Tensor, folded: int) -> Tensor:
    """Invert ``sources``: every folded weight's places in the shadow, (copies, folded)."""
    used = (sources >= 0).nonzero().squeeze(1)
    order = sources[used].argsort(stable=True)
    weight, place = sources[used][order].long(), used[order]
    first = torch.searchsorted(weight, weight)
    rank = torch.arange(len(weight)) - first
    copies = int(rank.max()) + 1 if len(rank) else 1
    targets = torch.full((copies, folded), -1, dtype=torch.int32)
    targets[rank, weight] = place.to(torch.int32)
    return targets


def _shaped(row: Tensor, shape: torch.Size) -> Tensor:
    """View a row as a weight; that of a convolution lies channels last."""
    if len(shape) != 4:
        return row.view(shape)
    return row.view(shape[0], *shape[2:], shape[1]).permute(0, 3, 1, 2)


def _row(gradient: Tensor, leaf: Tensor) -> Tensor:
    """Return a gradient as one row, in the order of its leaf in memory."""
    gradient = gradient.permute(0, 2, 3, 1) if leaf.dim() == 4 else gradient
    return gradient.reshape(-1)
