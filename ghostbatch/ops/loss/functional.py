"""The loss of a batch as a function that selects the kernel where it applies."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ghostbatch.ops.backends.base import has_triton

MOST_CLASSES = 4096
"""The kernel holds all outputs of a sample at once."""


def summed_cross_entropy(
    outputs: Tensor, labels: Tensor, weights: Tensor | None = None, smoothing: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Return the sum of the weighted losses, and the sums of losses and of correct answers.

    Args:
        outputs: (N, C), the only input with a gradient.
        labels: (N,).
        weights: (N,), of each sample's loss in the first result; None is 1.
        smoothing: ``label_smoothing`` of `F.cross_entropy`, in the first result.

    Returns:
        The sum of ``weights`` times the smoothed losses, to differentiate; and a float64 tensor of
        two values without a gradient: the sum of the losses without weights and smoothing, and how
        many samples have their largest output at their label.

    """
    if has_triton(outputs) and outputs.shape[1] <= MOST_CLASSES and len(outputs):
        from ghostbatch.ops.loss.kernel import SummedCrossEntropy  # noqa: PLC0415 (imports triton)

        return SummedCrossEntropy.apply(outputs, labels, weights, smoothing)  # type: ignore[no-any-return, no-untyped-call]
    losses = F.cross_entropy(outputs, labels, reduction="none")
    weighted = losses
    if smoothing:
        weighted = F.cross_entropy(outputs, labels, reduction="none", label_smoothing=smoothing)
    if weights is not None:
        weighted = weighted * weights.to(losses.dtype)
    correct = outputs.detach().argmax(1) == labels
    return weighted.sum(), torch.stack([losses.detach().double(), correct]).sum(1)
