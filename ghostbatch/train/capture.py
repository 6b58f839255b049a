"""Updates as one CUDA graph: the host launches one thing per update instead of a thousand."""

from collections.abc import Iterator
from typing import Any

import torch

from ghostbatch.data import Feed, MicroBatch, TensorFeed
from ghostbatch.train.ranks import Ranks
from ghostbatch.train.split import BatchSplit
from ghostbatch.train.state import State
from ghostbatch.train.update import Update

WARM_UP = 3
"""Updates that run eagerly before the capture: they compile kernels and make momentum buffers."""


class CapturedUpdate(Update):
    """An `Update` on one GPU whose `compute` is a CUDA graph.

    Everything that differs from update to update lies in tensors that `prepare` writes to: the
    draws of the batch, noise, dropout's key, and the learning rates. Weight decay and momentum are
    constants of the graph, so a regime that changes them has a graph for each phase.
    """

    engine = "cuda graph"

    feed: TensorFeed

    def __init__(self, state: State, feed: Feed, split: BatchSplit, ranks: Ranks) -> None:
        super().__init__(state, feed, split, ranks)
        self._draws = self.feed.draw(state.update).to(state.device)
        self._stream: Any = torch.cuda.Stream(state.device)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._constants: list[Any] = []
        self._eager_updates = 0
        self._draws_by_itself = False

    def prepare(self, stop: bool = False) -> None:
        """Set the tensors that differ from update to update."""
        super().prepare(stop)
        drawn = self.feed.draw(self.state.update)
        self._draws.copy_(drawn.pin_memory(), non_blocking=True)
        super().seed_draws(self.positions[0].start)

    def batches(self) -> Iterator[MicroBatch]:
        """Yield the micro-batches that ``_draws`` says."""
        return self.feed.make(self._draws, self.positions)

    def seed_draws(self, first: int) -> None:
        """Seed what a network draws by itself; a graph is seeded once, by `prepare`."""
        if not torch.cuda.is_current_stream_capturing():
            super().seed_draws(first)

    def compute(self) -> None:
        """Replay the graph; first run some updates eagerly and capture one."""
        if self._eager_updates < WARM_UP or self._cannot_capture():
            self._eager_updates += 1
            self._compute_on_stream()
            return
        constants = [(g["weight_decay"], g["momentum"]) for g in self._groups]
        if self._graph is None or constants != self._constants:
            self._graph, self._constants = torch.cuda.CUDAGraph(), constants
            # Other threads of this process may use the GPU meanwhile.
            with torch.cuda.graph(
                self._graph, stream=self._stream, capture_error_mode="thread_local"
            ):
                super().compute()
        self._graph.replay()

    @property
    def _groups(self) -> list[dict[str, Any]]:
        return self.state.optimizer.param_groups

    def _compute_on_stream(self) -> None:
        """Compute eagerly on the stream of the capture, where autograd must meet the weights."""
        here: Any = torch.cuda.current_stream(self.state.device)
        self._stream.wait_stream(here)
        with torch.cuda.stream(self._stream):
            super().compute()
        here.wait_stream(self._stream)
        generator = torch.cuda.default_generators[self.state.device.index or 0]
        self._draws_by_itself = generator.get_offset() > 0

    def _cannot_capture(self) -> bool:
        """Return whether micro-batches need a seed each, which one graph cannot have."""
        return self._draws_by_itself and len(self.positions) > 1

    def close(self) -> None:
        """Free the graph and its memory."""
        self._graph = None
        super().close()


def choose_update(state: State, feed: Feed, ranks: Ranks) -> type[Update]:
    """Return the fastest kind of update for a run: a CUDA graph on one GPU with the data on it."""
    captured = state.device.type == "cuda" and ranks.world == 1 and isinstance(feed, TensorFeed)
    return CapturedUpdate if captured else Update
