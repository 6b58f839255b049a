"""One weight update, and the running means of what it reports."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer


@dataclass
class Tally:
    """Sums over updates, kept on the device so that no update waits for the host."""

    sums: Tensor
    """Of loss, accuracy, gradient norm, and clipped or not."""
    updates: int = 0

    @classmethod
    def empty(cls, device: torch.device) -> "Tally":
        """Nothing counted yet."""
        return cls(torch.zeros(4, dtype=torch.float64, device=device))

    def add(self, loss: Tensor, accuracy: Tensor, norm: Tensor, clipped: Tensor) -> None:
        """Count one update."""
        self.sums += torch.stack([v.detach().double() for v in (loss, accuracy, norm, clipped)])
        self.updates += 1

    def means(self) -> dict[str, float]:
        """The means since the last call, which starts the next."""
        means = (self.sums / self.updates).tolist()
        self.sums.zero_()
        self.updates = 0
        names = ("loss", "accuracy", "gradient_norm", "clipped")
        return dict(zip(names, means, strict=True))

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"sums": self.sums, "updates": self.updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on counting."""
        self.sums.copy_(state["sums"])
        self.updates = state["updates"]


def update_weights(
    model: nn.Module,
    optimizer: Optimizer,
    images: Tensor,
    labels: Tensor,
    weights: Tensor | None,
    clip: float | None,
    autocast: torch.autocast,
    tally: Tally,
) -> None:
    """Forward, backward, clip, step.

    The gradient is the mean over samples of ``weights`` times each sample's gradient; the loss
    that is tallied is not weighted. Clipping comes before weight decay, which is the optimizer's.
    """
    with autocast:
        outputs = model(images)
        losses = F.cross_entropy(outputs, labels, reduction="none")
    optimizer.zero_grad(set_to_none=True)
    (losses if weights is None else losses * weights).mean().backward()
    parameters = [p for p in model.parameters() if p.grad is not None]
    norm = get_total_norm([p.grad for p in parameters if p.grad is not None])
    if clip is not None:
        clip_grads_with_norm_(parameters, clip, norm)
    optimizer.step()
    accuracy = 100 * (outputs.argmax(1) == labels).double().mean()
    clipped = norm > clip if clip is not None else torch.zeros_like(norm)
    tally.add(losses.mean(), accuracy, norm, clipped)
