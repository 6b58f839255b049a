"""Loss and accuracy on the test set."""

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ghostbatch.train.ranks import Ranks


@torch.no_grad()
def evaluate(
    model: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor]],
    autocast: torch.autocast,
    ranks: Ranks,
) -> tuple[float, float]:
    """Return mean loss and accuracy in percent over all ranks' batches; keep the model's mode."""
    training = model.training
    model.eval()
    device = next(model.parameters()).device
    sums = torch.zeros(3, dtype=torch.float64, device=device)  # of losses, correct answers, samples
    for images, labels in batches:
        with autocast:
            outputs = model(images)
        losses = F.cross_entropy(outputs.double(), labels, reduction="none")
        correct = outputs.argmax(1) == labels
        sums += torch.stack([losses, correct, torch.ones_like(losses)]).sum(1)
    model.train(training)
    loss, correct, samples = ranks.sum(sums).tolist()
    return loss / samples, 100 * correct / samples
