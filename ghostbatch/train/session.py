"""A run while it is going: it steps, writes down, saves and sums up."""

import gc
import time
from collections.abc import Iterator
from math import isfinite
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from ghostbatch.data import Feed, MicroBatch
from ghostbatch.draws import generator, key
from ghostbatch.errors import InputError, RankLocalError
from ghostbatch.nn import sync_statistics
from ghostbatch.optim import noise_weights
from ghostbatch.recipe import Plan
from ghostbatch.train.evaluate import evaluate
from ghostbatch.train.folder import RunFolder
from ghostbatch.train.ranks import Ranks
from ghostbatch.train.record import OnRecord, Record, Recorder, Status, Summary
from ghostbatch.train.split import BatchSplit
from ghostbatch.train.state import State
from ghostbatch.train.step import take_gradients
from ghostbatch.train.watch import find_nonfinite


class Interval(NamedTuple):
    """Time between checkpoints: whichever comes first."""

    seconds: float
    updates: int | None


class Step(NamedTuple):
    """How an update went."""

    problem: str | None
    """Why the weights did not take it."""
    stop: bool
    """Whether a rank was asked to end."""


class Session:
    """Goes on with a run from its state."""

    def __init__(
        self,
        plan: Plan,
        feed: Feed,
        state: State,
        cut: BatchSplit,
        ranks: Ranks,
        folder: RunFolder,
        kept: int,
        checkpoints: Interval,
        on_record: OnRecord | None,
    ) -> None:
        recipe, self.device = plan.recipe, state.device
        self.plan, self.state, self.ranks, self.folder = plan, state, ranks, folder
        self.cut, self.pieces = cut, cut.pieces(ranks.rank)
        self.parallel = ranks.parallel(state.model)
        self.parameters = [p for p in state.model.parameters() if p.requires_grad]
        self.feed = feed
        self.autocast = torch.autocast(
            self.device.type, torch.bfloat16, enabled=recipe.precision == "bf16"
        )
        self.recorder = Recorder(folder.metrics, kept, on_record) if ranks.first else None
        self.checkpoints = checkpoints
        self._looked: Record | None = None
        self._began = time.monotonic() - state.seconds
        self._saved = (time.monotonic(), state.update)

    # ------------------------------------------------------------------------------ updates

    def step(self, stop: bool = False) -> Step:
        """Do the next update, unless it would carry the weights to where no number is.

        ``stop`` tells the other ranks that this one was asked to end.
        """
        try:
            return self._step(stop)
        except (torch.OutOfMemoryError, RuntimeError) as error:
            if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error):
                raise self._too_large() from None
            raise

    def _step(self, stop: bool) -> Step:
        recipe, state = self.plan.recipe, self.state
        state.optimizer.zero_grad(set_to_none=True)
        mine = self._take_gradients()
        ours = self.ranks.sum(torch.cat([mine, mine.new_tensor([stop])]))
        norm = get_total_norm([p.grad for p in self.parameters if p.grad is not None])
        loss, correct, stops, size = torch.cat([ours, norm.double().view(1)]).tolist()
        loss, accuracy = loss / recipe.batch, 100 * correct / recipe.batch
        state.tally.add(loss, accuracy, size, recipe.clip is not None and size > recipe.clip)
        if (problem := state.watch.problem(loss, size)) is not None:
            return Step(problem, stops > 0)
        if recipe.clip is not None:  # before weight decay, which is the optimizer's
            clip_grads_with_norm_(self.parameters, recipe.clip, norm)
        state.optimizer.step()
        state.scheduler.step()
        state.update += 1
        return Step(None, stops > 0)

    def _take_gradients(self) -> Tensor:
        recipe, update = self.plan.recipe, self.state.update
        weights = None
        if recipe.noise:
            draw = generator(recipe.seed, "noise", update)
            weights = noise_weights(recipe.batch, recipe.batch, recipe.base_batch, draw)
        return take_gradients(
            self.parallel,
            (
                (p, p.positions != self.pieces[-1])
                for p in self.feed.micro_batches(update, self.pieces)
            ),
            factor=self.ranks.world / recipe.batch,
            weights=weights,
            autocast=self.autocast,
            at=self._draw_for,
        )

    def _draw_for(self, piece: MicroBatch) -> None:
        """Dropout layers know the place of each sample; what else a network draws, its start."""
        seed, update, first = self.plan.recipe.seed, self.state.update, piece.positions.start
        self.state.position.set(key(seed, "dropout", update), first)
        torch.manual_seed(key(seed, f"draws from {first}", update))

    def _too_large(self) -> InputError:
        cut, smaller = self.cut, self.cut.smaller()
        if smaller is not None:
            remedy = f"use micro {smaller}: the same numbers in less memory"
        elif cut.whole:
            remedy = "use more ranks, or ghost batch norm, which can be cut into micro-batches"
        elif cut.shard == cut.unit:
            remedy = "use a smaller ghost or network: it is one ghost already"
        else:
            remedy = f"use a batch that {cut.unit} divides: it can be cut into micro-batches"
        problem = f"{cut.shard} samples at a time do not fit into this device's memory"
        return RankLocalError("micro", problem, remedy)

    # ------------------------------------------------------------------------------ records

    def record_training(self) -> Record:
        """Write down the means over the updates since the last time."""
        return self._write(split="train", **self.state.tally.means())

    def record_validation(self) -> Record:
        """Look at the test set and write down what is seen."""
        mine = self.feed.test_batches(start=self.ranks.rank, step=self.ranks.world)
        loss, accuracy = evaluate(self.state.model, mine, self.autocast, self.device, self.ranks)
        self._looked = self._write(split="validation", loss=loss, accuracy=accuracy)
        return self._looked

    def _write(self, **what: Any) -> Record:
        done = self.state.update
        record = Record(
            update=done,
            epoch=self.plan.epoch(done),
            lr=self.state.scheduler.rates(max(0, done - 1)).lr,
            distance=self.state.distance.distance().total,
            **what,
        )
        if self.recorder is not None:
            self.recorder.write(record)
        return record

    # ---------------------------------------------------------------------- saving and ending

    def save_if_due(self) -> None:
        """Take a checkpoint if the last one is old enough."""
        at, update = self._saved
        seconds, updates = self.checkpoints
        late = updates is not None and self.state.update - update >= updates
        if late or time.monotonic() - at >= seconds:
            self.save()

    def save(self) -> None:
        """Take a checkpoint; it is the same on every rank, so the first can do it alone."""
        if self.recorder is not None:
            self.state.seconds = time.monotonic() - self._began
            self.recorder.sync()
            self.folder.checkpoints.save(self.state.state_dict(), self.recorder.position())
        self._saved = (time.monotonic(), self.state.update)

    def close(self) -> None:
        """Let go of the files and of the other ranks, however the run went."""
        if self.recorder is not None:
            self.recorder.close()
        self.feed.close()
        del self.parallel
        if self.ranks.world > 1:
            gc.collect()  # DDP is a cycle that keeps the group's threads, and they outlast Python

    def give_up(self, problem: str) -> Summary:
        """End a run that diverged, and say where that began."""
        self.record_training()
        last = self._looked
        if last is None or last.update != self.state.update:
            last = self.record_validation()
        found = find_nonfinite(self.state.model, self._inputs(), self.autocast)
        sync_statistics(self.state.model)
        where = self.ranks.min_over_ranks(found)
        clip = "" if self.plan.recipe.clip is not None else "clip the gradient (clip 5), "
        return self._end(
            last,
            "diverged",
            f"update {self.state.update + 1}: {problem}"
            + (f", first in the {where.what}" if where else "")
            + f"; {clip}lower regime.lr or add regime.warmup",
        )

    def _inputs(self) -> Iterator[Tensor]:
        """What the network sees in this update."""
        for piece in self.feed.micro_batches(self.state.update, self.pieces):
            self._draw_for(piece)
            yield piece.images

    def end(self) -> Summary:
        """Look at the test set once more and sum up."""
        last = self.record_validation()
        if isfinite(last.loss) and isfinite(last.distance):
            return self._end(last, "finished")
        problem = f"update {last.update}: it left weights that are not finite; lower regime.lr"
        return self._end(last, "diverged", problem)

    def _end(self, last: Record, status: Status, reason: str | None = None) -> Summary:
        """Write the summary, last of all."""
        summary = Summary(
            status=status,
            accuracy=last.accuracy,
            loss=last.loss,
            updates=last.update,
            epochs=last.epoch,
            distance=last.distance,
            seconds=time.monotonic() - self._began,
            reason=reason,
        )

        def write() -> Summary:
            self.folder.end(summary)
            return summary

        return self.ranks.on_rank_zero(write)
