"""The kernel of keyed dropout: hashes, compares and multiplies in one pass.

Tensor code takes about fifty kernels for the hash (`ghostbatch.nn.dropout`). Shapes: B values.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ghostbatch.ops.backends.base import on_device

BLOCK = 1024


@triton.jit
def mix(x):
    """Hash each 64-bit number: the step and the finaliser of splitmix64."""
    x = x * 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def dropout_kernel(
    x_ptr,  # (N, F, S) as one row: samples, features, values of a feature (dropped together)
    y_ptr,
    key_ptr,  # the update's key
    first_ptr,  # batch position of the first sample
    layer,  # number of the layer
    threshold,  # hashes from this on are kept
    scale,  # of the values that are kept
    values,  # N F S
    per_sample,  # F S
    per_feature,  # S
    B: tl.constexpr,
):
    """Write each value, or 0 where its feature is dropped."""
    at_B = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    keep_B = at_B < values
    sample_B = at_B // per_sample
    feature_B = (at_B % per_sample) // per_feature
    key = mix((tl.load(key_ptr) + layer).to(tl.uint64))
    row_B = mix(key + (sample_B + tl.load(first_ptr)).to(tl.uint64))
    bits_B = mix(row_B + feature_B.to(tl.uint64)) >> 11
    x_B = tl.load(x_ptr + at_B, keep_B, other=0.0).to(tl.float32)
    y_B = x_B * tl.where(bits_B >= threshold.to(tl.uint64), scale, 0.0)  # NaN stays NaN
    tl.store(y_ptr + at_B, y_B.to(y_ptr.dtype.element_ty), keep_B)


class KeyedDropoutFunction(torch.autograd.Function):
    """Dropout by a hash of key, layer, position and feature; backward hashes again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, key: Tensor, first: Tensor, *settings: Any) -> Tensor:
        """Return ``x`` (N, ...) with zeros; ``settings`` are those of `_launch`."""
        ctx.save_for_backward(key.clone(), first.clone())  # the next forward sets others
        ctx.settings = settings
        return _launch(x, key, first, *settings)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of ``x``."""
        dx = KeyedDropoutFunction.apply(dy, *ctx.saved_tensors, *ctx.settings)  # type: ignore[no-untyped-call]
        return dx, *(None,) * (2 + len(ctx.settings))


def _launch(
    x: Tensor, key: Tensor, first: Tensor, layer: int, features: int, threshold: int, scale: float
) -> Tensor:
    x = x.contiguous()
    y = torch.empty_like(x)
    per_sample = x.numel() // x.shape[0]
    with on_device(x.device):
        dropout_kernel[(triton.cdiv(x.numel(), BLOCK),)](
            *(x, y, key, first, layer, threshold, scale),
            *(x.numel(), per_sample, per_sample // features),
            B=BLOCK,
        )
    return y
