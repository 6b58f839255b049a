"""Loss and accuracy on the test set."""

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@torch.no_grad()
def evaluate(
    model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]], autocast: torch.autocast
) -> tuple[float, float]:
    """Mean loss and accuracy in percent, with running statistics; the model's mode is kept."""
    training = model.training
    model.eval()
    loss, correct, count = 0.0, 0, 0
    for images, labels in batches:
        with autocast:
            outputs = model(images)
        loss += float(F.cross_entropy(outputs.double(), labels, reduction="sum"))
        correct += int((outputs.argmax(1) == labels).sum())
        count += len(labels)
    model.train(training)
    return loss / count, 100 * correct / count
