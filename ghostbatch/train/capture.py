"""Runs each update as one CUDA graph, which the host launches at once."""

from collections.abc import Iterator
from typing import Any

import torch

from ghostbatch.data import BatchSplit, Feed, MicroBatch, TensorFeed
from ghostbatch.errors import InputError
from ghostbatch.nn import MODELS
from ghostbatch.train.device import PROCESS
from ghostbatch.train.ranks import Ranks
from ghostbatch.train.state import State
from ghostbatch.train.update import Update

WARM_UP = 3
"""Updates that run eagerly before the capture: they compile kernels and make momentum buffers."""


class CapturedUpdate(Update):
    """An `Update` on one GPU whose `compute` is a CUDA graph.

    Everything that differs from update to update lies in tensors that `prepare` writes to: the
    draws of the batch, noise, dropout's key, and the learning rates. Weight decay and momentum are
    constants of the graph, so a regime that changes them has a graph for each phase. A batch that
    grows has a graph for each size, and the first updates of a size run eagerly.

    What a network decides on the host in its forward is a constant of the graph, too. A network
    that draws PyTorch's random numbers on the host stays eager; other decisions, by a counter or by
    Python's random, are not noticed.
    """

    engine = "cuda graph"
    feed: TensorFeed

    def __init__(self, state: State, feed: Feed, split: BatchSplit, ranks: Ranks) -> None:
        super().__init__(state, feed, split, ranks)
        self._draws = torch.empty(0, device=state.device)
        # A run in a thread has a stream of its own already. A new one could be that of another run:
        # PyTorch has 32 streams, and gives them out in turn.
        self._stream: Any = torch.cuda.current_stream(state.device)
        if self._stream == torch.cuda.default_stream(state.device):
            self._stream = torch.cuda.Stream(state.device)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._constants: list[Any] = []
        self._eager_updates = 0
        self._draws_by_itself = True
        """Whether the network draws random numbers on the GPU; supposed until it is known."""
        self._stays_eager = False
        self._seeded = torch.get_rng_state()

    def prepare(self, stop: bool = False) -> None:
        """Set the tensors that differ from update to update."""
        super().prepare(stop)
        drawn = torch.cat([self.feed.draw(batch) for batch in self.stream], 1)
        if drawn.shape != self._draws.shape:
            self._draws = torch.empty_like(drawn, device=self.state.device)
            self._graph, self._eager_updates = None, 0
        self._draws.copy_(drawn.pin_memory(), non_blocking=True)
        if self._draws_by_itself:
            super().seed_draws(self.positions[0].start)

    def batches(self) -> Iterator[MicroBatch]:
        """Yield the micro-batches that `_draws` describes."""
        return self.feed.make(self._draws, self.positions)

    def seed_draws(self, first: int) -> None:
        """Seed what a network draws by itself; a graph is seeded once, by `prepare`."""
        if not torch.cuda.is_current_stream_capturing():
            super().seed_draws(first)
            self._seeded = torch.get_rng_state()

    def compute(self) -> None:
        """Replay the graph; first run some updates eagerly and capture one."""
        if self._eager_updates < WARM_UP or self._stays_eager:
            self._eager_updates += 1
            self._compute_on_stream()
            return
        groups = self.state.optimizer.param_groups
        constants = [(group["weight_decay"], group.get("momentum")) for group in groups]
        if self._graph is None or constants != self._constants:
            self._graph, self._constants = self._capture(), constants
        self._graph.replay()

    def _capture(self) -> torch.cuda.CUDAGraph:
        """Return the graph of an update; refuse a network that cannot be captured."""
        graph = torch.cuda.CUDAGraph()
        for group in self.state.optimizer.param_groups:
            if "capturable" in group:  # PyTorch's Adam warns where this is set before the capture
                group["capturable"] = True
        try:
            # Other threads of this process may use the GPU meanwhile, but not capture.
            capture = torch.cuda.graph(graph, None, self._stream, capture_error_mode="thread_local")
            with PROCESS, capture:
                super().compute()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            reason = str(error).split("\n")[0]
            problem = f"{self.recipe.model} cannot be captured in a CUDA graph ({reason})"
            raise InputError("capture", problem, "turn it off: slower, the same numbers") from error
        return graph

    def _compute_on_stream(self) -> None:
        """Compute eagerly on the stream of the capture; note whether the network draws by itself.

        Autograd remembers the stream of each weight's first use, so both must share a stream.
        """
        device = self.state.device
        here: Any = torch.cuda.current_stream(device)
        self._stream.wait_stream(here)
        with torch.cuda.stream(self._stream):
            super().compute()
        here.wait_stream(self._stream)
        if self.recipe.model in MODELS:  # draws nothing; a run beside it may
            return
        index = torch.cuda.current_device() if device.index is None else device.index
        self._draws_by_itself = torch.cuda.default_generators[index].get_offset() > 0
        # One graph has one seed, and nothing of what the host draws.
        several = self._draws_by_itself and len(self.positions) > 1
        self._stays_eager = several or not torch.equal(torch.get_rng_state(), self._seeded)

    def close(self) -> None:
        """Free the graph and its memory."""
        self._graph = None
        super().close()


def choose_update(state: State, feed: Feed, ranks: Ranks, capture: bool = True) -> type[Update]:
    """Return the kind of update of a run: a CUDA graph on one GPU with the data on it, if wanted.

    fp64 has no graph, see `State`. Neither has dropconnect: its masks were never tried in one.
    """
    on_one_gpu = state.device.type == "cuda" and ranks.world == 1 and isinstance(feed, TensorFeed)
    recipe = state.plan.recipe
    fits = on_one_gpu and recipe.precision != "fp64" and not recipe.dropconnect
    return CapturedUpdate if capture and fits else Update
