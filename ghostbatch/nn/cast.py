"""Runs a model under autocast with all its weights cast at once, instead of layer by layer.

Autocast casts the weight of every convolution and linear layer by a kernel of its own, forward and
backward. For small batches these kernels take as long as the layers themselves.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ghostbatch.nn.fold import FoldedConv2d, PatchConv2d, fold_weights


def call_with_cast_weights(model: nn.Module, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``model(x)`` with the weights of convolutions and linear layers cast to ``dtype``.

    Call it under autocast, which does the rest. The gradients of the weights have the weights' own
    dtype, as under autocast alone. It is for networks whose layers are called once each, under
    autocast, such as those of `MODELS`; a second derivative raises an error.
    """
    names, weights = [], []
    folded: dict[Any, list[tuple[str, Tensor]]] = {}
    for layer_name, layer in model.named_modules():
        if type(layer) not in (nn.Linear, nn.Conv2d, FoldedConv2d, PatchConv2d):
            continue
        for name, weight in layer.named_parameters(layer_name, recurse=False):
            if type(layer) is FoldedConv2d and weight is layer.weight:
                kind = (weight.shape, layer.stride[0], layer.fold)
                folded.setdefault(kind, []).append((name, weight))
            else:
                names.append(name)
                weights.append(weight)
    cast: dict[str, Tensor] = {}
    for (_, stride, fold), members in folded.items():
        stacked = fold_weights(torch.stack([w for _, w in members]), stride, fold).to(dtype)
        cast |= zip((name for name, _ in members), stacked.unbind(), strict=True)
    if weights:
        copies = CastTogether.apply(dtype, *weights)  # type: ignore[no-untyped-call]
        cast |= zip(names, copies, strict=True)
    return functional_call(model, cast, (x,))  # type: ignore[no-any-return]


class CastTogether(torch.autograd.Function):
    """Casts many tensors to one dtype in a few kernels; the gradients are cast back likewise."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return copies of ``tensors``, laid out as they are."""
        copies = [torch.empty_like(tensor, dtype=dtype) for tensor in tensors]
        torch._foreach_copy_(copies, list(tensors))
        ctx.set_materialize_grads(False)
        ctx.dtypes = [tensor.dtype for tensor in tensors]
        return tuple(copies)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradients in the dtypes of the tensors."""
        given = [
            (g, torch.empty_like(g, dtype=dtype))
            for g, dtype in zip(gradients, ctx.dtypes, strict=True)
            if g is not None
        ]
        if given:
            torch._foreach_copy_([cast for _, cast in given], [g for g, _ in given])
        casts = iter([cast for _, cast in given])
        return None, *(None if g is None else next(casts) for g in gradients)
