"""What a run writes: records, checkpoints and its summary."""

import time
from bisect import bisect_left
from collections.abc import Sequence
from math import isfinite
from typing import Any

import torch

from ghostbatch.data import BatchSplit, Feed, FolderFeed
from ghostbatch.diagnostics import log_spaced
from ghostbatch.nn import sync_statistics
from ghostbatch.plan import Plan
from ghostbatch.train.divergence import find_nonfinite
from ghostbatch.train.evaluate import (
    can_recalibrate,
    evaluate,
    norms_with_statistics,
    population_statistics,
    recalibration_batches,
)
from ghostbatch.train.explain import explain_faults
from ghostbatch.train.folder import RunFolder
from ghostbatch.train.measure import Measure
from ghostbatch.train.monitor import Reading
from ghostbatch.train.ranks import Ranks
from ghostbatch.train.record import (
    OnProgress,
    OnRecord,
    Progress,
    Record,
    Recorder,
    Status,
    Summary,
)
from ghostbatch.train.split import evaluation_remedy
from ghostbatch.train.state import State, autocast
from ghostbatch.train.update import Update


class Journal:
    """Records, saves and ends a run. Call every method on all ranks; the first one writes."""

    def __init__(
        self,
        state: State,
        feed: Feed,
        split: BatchSplit,
        ranks: Ranks,
        folder: RunFolder,
        kept_bytes: int,
        measures: Sequence[Measure],
        *,
        checkpoint_seconds: float,
        checkpoint_updates: int | None,
        on_record: OnRecord | None,
        on_progress: OnProgress | None,
    ) -> None:
        self.state, self.feed, self.ranks, self.folder = state, feed, ranks, folder
        self.split, self.measures = split, measures
        self.plan = state.plan
        self.checkpoint_seconds, self.checkpoint_updates = checkpoint_seconds, checkpoint_updates
        self.recorder = Recorder(folder.metrics, kept_bytes, on_record) if ranks.rank == 0 else None
        self._on_progress = on_progress if ranks.rank == 0 else None
        self._validation: Record | None = None
        self._began = time.monotonic() - state.seconds
        self._saved = (time.monotonic(), state.update)

    def show_progress(self, engine: str) -> None:
        """Call ``on_progress``; ``engine`` is what computes the updates."""
        if self._on_progress is not None:
            self._on_progress(
                Progress(
                    plan=self.plan,
                    device=str(self.state.device),
                    threads=torch.get_num_threads(),
                    engine=engine,
                    update=self.state.update,
                    end=self.state.end,
                )
            )

    def record_training(self) -> None:
        """Record the means over the updates since the last training record."""
        self._write(split="train", **self.state.monitor.means())
        self._share_skipped()

    def _share_skipped(self) -> None:
        """Tell all ranks which images any of them has skipped."""
        if isinstance(self.feed, FolderFeed) and self.feed.skip:
            for numbers in self.state.skipped.parts.values():
                numbers.update(*self.ranks.gather(numbers))

    def record_validation(self) -> Record:
        """Evaluate on the test set, measure what is wanted, record and return the result."""
        loss, accuracy = self._evaluate()
        measured: dict[str, float] = {}
        for measure in self.measures if isfinite(loss) else ():
            measured |= measure()
        validation: dict[str, Any] = {"split": "validation", "loss": loss, "accuracy": accuracy}
        self._validation = self._write(**validation, **measured)
        return self._validation

    def _evaluate(self) -> tuple[float, float]:
        """Return loss and accuracy on the test set."""
        batches = self.feed.test_batches(start=self.ranks.rank, step=self.ranks.world)
        arithmetic = autocast(self.plan.recipe, self.state.device)
        shard = min(self.split.eval_shard or self.feed.test_batch, self.feed.test_batch)
        problem = f"an evaluation of {shard} samples at a time does not fit into the memory"
        with explain_faults("micro", problem, evaluation_remedy(self.split, shard)):
            return evaluate(self.state.model, batches, arithmetic, self.ranks, shard)

    def _evaluate_recalibrated(self) -> float | None:
        """Return the accuracy with running statistics averaged over the training set.

        The model's own are put back. Return None if they cannot be averaged.
        """
        model = self.state.model
        if not can_recalibrate(model):
            return None
        positions = self.split.positions(self.ranks.rank)
        batches = recalibration_batches(self.feed, self.plan, self.state.update, positions)
        with population_statistics(model, batches, autocast(self.plan.recipe, self.state.device)):
            return self._evaluate()[1]

    def _evaluate_average(self) -> float | None:
        """Return the accuracy of the averaged weights, with running statistics that fit them.

        The model's own weights are put back. Return None if there is no average, or if there are
        running statistics that cannot be averaged.
        """
        if self.state.average is None:
            return None
        with self.state.average.applied():
            if norms_with_statistics(self.state.model):
                return self._evaluate_recalibrated()
            return self._evaluate()[1]

    def _write(self, **measured: Any) -> Record:
        done = self.state.update
        record = Record(
            update=done,
            epoch=self.plan.epoch(done),
            lr=self.state.scheduler.rates(max(0, done - 1)).lr,
            distance=self.state.distance.distance().total,
            **measured,
        )
        if self.recorder is not None:
            self.folder.check_lock()
            self.recorder.write(record)
        return record

    def save_if_due(self, next_chance: int = 1) -> None:
        """Write a checkpoint if one is due, or would be overdue in ``next_chance`` updates."""
        time_saved, saved = self._saved
        since = self.state.update + next_chance - saved
        overdue = self.checkpoint_updates is not None and since > self.checkpoint_updates
        if overdue or time.monotonic() - time_saved >= self.checkpoint_seconds:
            self.save()

    def save(self) -> None:
        """Write a checkpoint, on the first rank, unless the last update left weights not finite."""
        if self.recorder is not None and isfinite(self.state.distance.distance().total):
            self.state.seconds = time.monotonic() - self._began
            self.folder.save(self.state.state_dict(), self.recorder.sync())
        self._saved = (time.monotonic(), self.state.update)

    def end(self) -> Summary:
        """Evaluate once more, write the summary and return it."""
        last = self.record_validation()
        if isfinite(last.loss) and isfinite(last.distance):
            recalibrated, average = self._evaluate_recalibrated(), self._evaluate_average()
            return self._end(last, "finished", recalibrated=recalibrated, average=average)
        problem = f"update {last.update} left weights that are not finite; lower regime.lr"
        return self._end(last, "diverged", problem)

    def give_up(self, reading: Reading, update: Update) -> Summary:
        """End a diverged run: find the layer where it began, write the summary and return it."""
        self.state.update -= reading.skipped
        self.record_training()
        last = self._validation
        if last is None or last.update != self.state.update:
            last = self.record_validation()
        # The current gradients are clipped, and on a GPU may belong to a later update.
        update.prepare()
        with update.dropconnect.masked():
            update.compute_gradients()
            update.show_gradients()
            inputs = (micro.images for micro in update.micro_batches())
            found = find_nonfinite(self.state.model, inputs, update.autocast)
        sync_statistics(self.state.model)
        first = min(filter(None, self.ranks.gather(found)), default=None)
        where = f", first in the {first.what}" if first else ""
        clip = "" if self.plan.recipe.clip is not None else "clip the gradient (clip 5), "
        remedy = f"{clip}lower regime.lr or add regime.warmup"
        reason = f"update {self.state.update + 1}: {reading.problem}{where}; {remedy}"
        return self._end(last, "diverged", reason)

    def _end(
        self,
        last: Record,
        status: Status,
        reason: str | None = None,
        recalibrated: float | None = None,
        average: float | None = None,
    ) -> Summary:
        """Write the summary, when all records are on the disk: it comes last of all files."""
        self._share_skipped()
        skipped = self.state.skipped.parts
        summary = Summary(
            status=status,
            accuracy=last.accuracy,
            loss=last.loss,
            updates=last.update,
            epochs=last.epoch,
            distance=last.distance,
            seconds=time.monotonic() - self._began,
            reason=reason,
            skipped_images=len(skipped["train"]),
            skipped_test_images=len(skipped["test"]),
            recalibrated_accuracy=recalibrated,
            ema_accuracy=average,
            held_out=self.plan.recipe.holdout > 0,
        )

        def write() -> Summary:
            if self.recorder is not None:
                self.recorder.sync()
            return self.folder.end(summary)

        return self.ranks.on_rank_zero(write)

    def close(self) -> None:
        """Close the file of records."""
        if self.recorder is not None:
            self.recorder.close()


def schedule(plan: Plan, evaluations: int) -> tuple[set[int], set[int]]:
    """Return the updates after which training is logged, and those after which it is evaluated.

    Evaluations are evenly spaced in images, and a few more cover the start.
    """
    ends = (round(plan.length * k / evaluations) for k in range(1, evaluations + 1))
    updates = range(plan.updates)
    evenly = {bisect_left(updates, end, key=lambda u: plan.stream(u).start) for end in ends}
    eval_updates = evenly | set(log_spaced(plan.updates, per_decade=4))
    return eval_updates | set(log_spaced(plan.updates)), eval_updates
