"""What is measured in every update, kept on the device: running means, and the divergence check.

Reading a number from a GPU waits for it, so an update only adds to tensors here; the loop calls
`Monitor.read` and `Monitor.means` when it logs.
"""

from math import inf, isfinite, isnan
from typing import Any, NamedTuple

import torch
from torch import Tensor

FAR = 10.0
"""A loss above this multiple of the first update's loss counts as far above the start."""

PATIENCE = 100
"""Consecutive updates with such a loss after which the run counts as diverged."""

MEANS = ("loss", "accuracy", "gradient_norm", "clipped")


class Reading(NamedTuple):
    """The monitor's state, read by the host."""

    problem: str | None
    """Why the run counts as diverged; None while it does not."""
    skipped: int
    """Updates whose optimizer step was skipped, including the diverging one."""
    stop: bool
    """Whether a rank was asked to stop."""


class Monitor:
    """Running means of the training metrics, and the check for divergence, on the device.

    Args:
        clip: largest gradient norm that is not clipped; None if nothing is.
        device: where the updates are computed.

    """

    def __init__(self, clip: float | None, device: torch.device | str = "cpu") -> None:
        self.numbers = torch.zeros(11, dtype=torch.float64, device=device)
        """In this order: sums of `MEANS` and of updates; the loss of the first update; consecutive
        updates with a loss far above it; the last loss and gradient norm; skipped updates; requests
        to stop. `judge_kernel` knows the order, too."""
        self._sums, self._first, self._above, self._last, self._skipped, self._stop = (
            self.numbers.split([len(MEANS) + 1, 1, 1, 2, 1, 1])
        )
        self._first.fill_(torch.nan)
        self._clip = inf if clip is None else clip
        self.diverged = torch.zeros((), device=device)
        """1 from the update at which the run diverged, else 0."""

    def add(self, loss: Tensor, accuracy: Tensor, norm: Tensor, stop: Tensor) -> None:
        """Add one update's mean loss, accuracy, gradient norm and number of stop requests.

        All are 0-dimensional float64 tensors. After divergence only requests to stop count.
        """
        live = self.diverged == 0
        values = torch.stack([loss, accuracy, norm, norm > self._clip, torch.ones_like(loss)])
        self._sums.add_(torch.where(live, values, 0.0))
        self._last.copy_(torch.where(live, torch.stack([loss, norm]), self._last))
        finite = loss.isfinite() & norm.isfinite()
        self._first.copy_(torch.where(self._first.isnan() & finite, loss, self._first))
        far = loss > FAR * self._first
        self._above.copy_(torch.where(live, (self._above + 1) * far, self._above))
        self.diverged.copy_(~(live & finite & (self._above < PATIENCE)).squeeze())
        self._skipped.add_(self.diverged)
        self._stop.add_(stop)

    def read(self) -> Reading:
        """Return whether the run diverged, or was asked to stop since the last call.

        Waits for the device.
        """
        *_, loss, norm, skipped, stop = self.numbers.tolist()
        diverged = skipped > 0
        self._stop.zero_()
        return Reading(_problem(loss, norm) if diverged else None, int(skipped), stop > 0)

    def means(self) -> dict[str, float]:
        """Return the means over the updates since the last call, and start new ones."""
        *sums, updates = self._sums.tolist()
        self._sums.zero_()
        return {name: total / updates for name, total in zip(MEANS, sums, strict=True)}

    def state_dict(self) -> dict[str, Any]:
        """Return plain numbers for a checkpoint."""
        first = float(self._first)
        return {
            "sums": self._sums.tolist(),
            "first": None if isnan(first) else first,
            "above": int(self._above),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what `state_dict` returned."""
        self._sums.copy_(torch.tensor(state["sums"], dtype=torch.float64))
        self._first.fill_(torch.nan if state["first"] is None else state["first"])
        self._above.fill_(state["above"])


def _problem(loss: float, norm: float) -> str:
    """Say why an update with this loss and gradient norm counts as diverged."""
    if not isfinite(loss):
        return f"the loss is {loss}"
    if not isfinite(norm):
        return f"the gradient's norm is {norm}"
    return f"the loss is {loss:.3g} and has been above {FAR:g} x its first for {PATIENCE} updates"
