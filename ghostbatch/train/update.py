"""One update of the weights, from zeroed gradients to the next learning rate."""

import gc
from collections.abc import Iterator
from contextlib import nullcontext
from math import inf
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from ghostbatch.data import BatchSplit, Feed, MicroBatch, to_device
from ghostbatch.draws import generator, key, seed_generators
from ghostbatch.nn import MODELS, DropConnect
from ghostbatch.ops.backends.base import has_triton
from ghostbatch.ops.loss import summed_cross_entropy
from ghostbatch.optim import noise_weights, random_labels
from ghostbatch.train.evaluate import leaves_out_parameters
from ghostbatch.train.monitor import FAR, PATIENCE
from ghostbatch.train.ranks import Ranks
from ghostbatch.train.state import State, autocast

if TYPE_CHECKING:
    from ghostbatch.nn.flat import FlatWeights


class Update:
    """Runs the updates of a run, one per call, and measures them in ``state.monitor``.

    A call sets what differs from update to update (`prepare`), and then only works on the device
    (`compute`). It does not wait for the GPU, except with hold "distance": that scheduler measures
    the weights after every update.
    """

    engine = "eager"
    """Name of this way to compute an update, for ``run.json``."""

    def __init__(self, state: State, feed: Feed, split: BatchSplit, ranks: Ranks) -> None:
        self.state, self.feed, self.split, self.ranks = state, feed, split, ranks
        self.recipe = state.plan.recipe
        foreign = ranks.world > 1 and self.recipe.model not in MODELS
        self.parallel = ranks.parallel(state.model, foreign and leaves_out_parameters(state))
        self.parameters = [p for p in state.model.parameters() if p.requires_grad]
        self.autocast = autocast(self.recipe, state.device)
        # DDP's context in which gradients stay on their rank; without DDP there is nothing to do.
        self._no_sync: Any = getattr(self.parallel, "no_sync", nullcontext)
        self.flat: FlatWeights | None = None
        if uses_flat_weights(state, ranks):
            self.flat = self._make_flat()
        self._stop = torch.zeros(1, dtype=torch.float64, device=state.device)
        self._noise: Tensor | None = None
        if self.recipe.noise:
            self._noise = torch.empty(self.recipe.batch, device=state.device)
        self._labels: Tensor | None = None  # label noise, see `random_labels`
        if self.recipe.label_noise:
            most = self.recipe.batch * max(state.plan.batches)
            self._labels = torch.empty(most, dtype=torch.long, device=state.device)
        self.dropconnect = DropConnect(state.model, self.recipe.dropconnect)
        # A fused optimizer's kernel reads found_inf and leaves the weights alone where it is 1.
        self._skips_on_device = state.device.type == "cuda"
        if self._skips_on_device:
            state.optimizer.found_inf = state.monitor.diverged  # type: ignore[attr-defined]

    def __call__(self, stop: bool = False) -> None:
        """Run one update; leave the weights alone if its loss or gradient norm is not finite.

        ``stop`` tells all ranks, through ``state.monitor``, that this one was asked to stop.
        """
        self.prepare(stop)
        self.compute()
        if self._skips_on_device or not self.state.monitor.diverged:
            self.state.scheduler.step()
        self.state.update += 1

    @property
    def stream(self) -> range:
        """The batches of the stream that the coming update takes: several where they have grown."""
        return self.state.plan.stream(self.state.update)

    @property
    def samples(self) -> int:
        """Samples of the coming update, over all ranks."""
        return self.recipe.batch * len(self.stream)

    @property
    def positions(self) -> list[slice]:
        """Which of these samples this rank computes, one slice for each micro-batch."""
        return self.split.positions(self.ranks.rank, len(self.stream))

    def _make_flat(self) -> "FlatWeights":
        """Move the weights and their momentum to flat buffers; the optimizer keeps its own view."""
        from ghostbatch.nn.flat import FlatWeights  # noqa: PLC0415 (imports triton)

        _, *undecayed = self.state.optimizer.param_groups
        rest = [weight for group in undecayed for weight in group["params"]]
        flat = FlatWeights(self.state.model, torch.bfloat16, rest)
        for parameter, momentum in flat.momentum():
            kept = self.state.optimizer.state[parameter]
            if (before := kept.get("momentum_buffer")) is not None:
                momentum.copy_(before)
            kept["momentum_buffer"] = momentum
        # PyTorch's schedulers warn if nobody calls the optimizer's own step.
        self.state.optimizer._opt_called = True  # type: ignore[attr-defined]
        return flat

    def prepare(self, stop: bool = False) -> None:
        """Set the tensors that differ from update to update: noise, keys of masks, stop."""
        recipe, update = self.recipe, self.state.update
        if recipe.reset_momentum and self.state.plan.begins_epoch(update):
            self._reset_momentum()
        self._stop.fill_(stop)
        if self._noise is not None:
            draw = generator(recipe.seed, "noise", update)
            weights = noise_weights(recipe.batch, recipe.batch, recipe.base_batch, draw)
            self._noise.copy_(to_device(weights, self._noise.device))
        if self._labels is not None:
            draw = generator(recipe.seed, "labels", update)
            labels = random_labels(self.samples, self.state.info.classes, recipe.label_noise, draw)
            self._labels[: self.samples].copy_(to_device(labels, self._labels.device))
        self.dropconnect.set_key(key(recipe.seed, "dropconnect", update))
        if self.state.position is not None:
            self.state.position.key.fill_(key(recipe.seed, "dropout", update))

    def _reset_momentum(self) -> None:
        """Set the optimizer's moments to zero, in place: a CUDA graph may hold their addresses."""
        for kept in self.state.optimizer.state.values():
            for value in kept.values():
                if isinstance(value, Tensor):
                    value.zero_()

    def compute(self) -> None:
        """Compute the gradients, add to the monitor, clip and step."""
        recipe, state = self.recipe, self.state
        with self.dropconnect.masked():
            sums = torch.cat([self.compute_gradients(), self._stop])
        if self.flat is not None:
            self._step_flat(self.flat, sums)
            self._add_to_average()
            return
        if self.ranks.world > 1:
            dist.all_reduce(sums)
        loss, correct, stops = sums.unbind()
        norm = get_total_norm([p.grad for p in self.parameters if p.grad is not None])
        accuracy = 100 * correct / self.samples
        state.monitor.add(loss / self.samples, accuracy, norm.double(), stops)
        # Before weight decay, which the optimizer adds. PyTorch multiplies by a factor of 1, too,
        # because reading the norm would wait for a GPU; on a CPU this pass is left out.
        if recipe.clip is not None and (self._skips_on_device or norm + 1e-6 > recipe.clip):
            clip_grads_with_norm_(self.parameters, recipe.clip, norm)
        if self._skips_on_device or not state.monitor.diverged:
            state.optimizer.step()
            self._add_to_average()

    def _add_to_average(self) -> None:
        """Add the weights to their average, also where the GPU has skipped a diverged step."""
        if self.state.average is not None:
            self.state.average.update()

    def _step_flat(self, flat: "FlatWeights", sums: Tensor) -> None:
        """Do with flat weights what `compute` does with the optimizer."""
        group, *_ = self.state.optimizer.param_groups  # the others have no weight decay
        monitor = self.state.monitor
        lr = torch.as_tensor(group["lr"], dtype=torch.float32, device=sums.device)
        flat.step(
            *(sums, monitor.numbers, monitor.diverged, lr),
            batch=self.samples,
            far=FAR,
            patience=PATIENCE,
            clip=inf if self.recipe.clip is None else self.recipe.clip,
            **{name: group[name] for name in ("momentum", "weight_decay", "nesterov")},
        )

    def compute_gradients(self) -> Tensor:
        """Compute the gradients of the update's mean loss, after `prepare`.

        Return this rank's summed loss, without noise and for the true labels, not smoothed, and
        its number of correct answers: a float64 tensor of two values.
        """
        self.state.optimizer.zero_grad(set_to_none=True)
        positions = self.positions
        factor = self.ranks.world / self.samples  # DDP averages over ranks
        sums = torch.zeros(2, dtype=torch.float64, device=self.state.device)
        for micro in self.micro_batches():
            last = micro.positions == positions[-1]
            with nullcontext() if last else self._no_sync():
                with self.autocast:
                    outputs = (self.flat or self.parallel)(micro.images)
                    weights = None if self._noise is None else self._noise[micro.positions]
                    options = (weights, self.recipe.label_smoothing)
                    loss, found = summed_cross_entropy(outputs, micro.labels, *options)
                    if self._labels is not None:
                        drawn = self._labels[micro.positions]
                        noisy = torch.where(drawn < 0, micro.labels, drawn)
                        loss, _ = summed_cross_entropy(outputs, noisy, *options)
                (loss * factor).backward()
            if self.flat is not None:
                self.flat.take_gradients(add=micro.positions != positions[0])
            sums = sums + found
        return sums

    def show_gradients(self) -> None:
        """Set every ``grad`` to what `compute_gradients` computed, if it is not there already."""
        if self.flat is not None:
            self.flat.show_gradients()

    def micro_batches(self) -> Iterator[MicroBatch]:
        """Yield this rank's micro-batches of the coming update, with random draws keyed to each.

        Dropout layers key their masks by the position of each sample; anything else that a network
        draws is keyed by the position of the micro-batch's first sample.
        """
        for micro in self.batches():
            first = micro.positions.start
            if self.state.position is not None:
                self.state.position.first.fill_(first)
            self.seed_draws(first)
            yield micro

    def batches(self) -> Iterator[MicroBatch]:
        """Yield this rank's micro-batches of the coming update."""
        parts = self.split.positions(self.ranks.rank)
        micros = (micro for batch in self.stream for micro in self.feed.micro_batches(batch, parts))
        for micro, positions in zip(micros, self.positions, strict=True):
            yield micro._replace(positions=positions)

    def seed_draws(self, first: int) -> None:
        """Seed what a network draws by itself in the micro-batch that begins at ``first``.

        Our own draw nothing, and may run beside others that build their networks.
        """
        if self.recipe.model not in MODELS:
            seed = key(self.recipe.seed, f"draws from {first}", self.state.update)
            seed_generators(seed, self.state.device)

    def close(self) -> None:
        """Release the DDP wrapper, a cycle that keeps the threads of the process group alive."""
        del self.parallel, self._no_sync
        if self.ranks.world > 1:
            gc.collect()


def uses_flat_weights(state: State, ranks: Ranks) -> bool:
    """Return whether kernels of ours do the step: one rank, our own networks, bf16, SGD, a GPU."""
    recipe = state.plan.recipe
    return (
        ranks.world == 1
        and recipe.model in MODELS
        and recipe.precision == "bf16"
        and not recipe.dropconnect
        and type(state.optimizer) is torch.optim.SGD
        and has_triton(next(state.model.parameters()).detach())
    )
