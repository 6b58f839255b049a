"""A run while it is going: it steps, writes down, saves and sums up."""

import time
from math import isfinite
from typing import Any

import torch

from ghostbatch.data import Feed, ImageData, generator, key
from ghostbatch.optim import noise_weights
from ghostbatch.recipe import Plan
from ghostbatch.train.evaluate import evaluate
from ghostbatch.train.folder import RunFolder
from ghostbatch.train.record import OnRecord, Record, Recorder, Status, Summary
from ghostbatch.train.state import State, parameter_dtype
from ghostbatch.train.step import update_weights


class Session:
    """Begins a run, or continues it from what was saved of it."""

    def __init__(
        self,
        plan: Plan,
        data: ImageData,
        folder: RunFolder,
        device: torch.device,
        saved: dict[str, Any] | None,
        on_record: OnRecord | None,
    ) -> None:
        recipe = plan.recipe
        self.plan, self.folder = plan, folder
        self.state = State(plan, data, device)
        if saved is not None:
            self.state.load_state_dict(saved["state"])
        self.feed = Feed(
            data,
            batch=recipe.batch,
            seed=recipe.seed,
            augment=recipe.augment,
            device=device,
            dtype=parameter_dtype(recipe),
        )
        self.autocast = torch.autocast(
            device.type, torch.bfloat16, enabled=recipe.precision == "bf16"
        )
        self.recorder = Recorder(folder.metrics, saved["metrics"] if saved else 0, on_record)
        self._began = time.monotonic() - self.state.seconds
        self._saved = time.monotonic()

    def step(self) -> None:
        """Do the next update."""
        recipe, state = self.plan.recipe, self.state
        images, labels = self.feed.train_batch(state.update)
        weights = None
        if recipe.noise:
            draw = generator(recipe.seed, "noise", state.update)
            weights = noise_weights(recipe.batch, recipe.batch, recipe.base_batch, draw)
            weights = weights.to(images)
        torch.manual_seed(key(recipe.seed, "dropout", state.update))
        update_weights(
            state.model,
            state.optimizer,
            images,
            labels,
            weights,
            recipe.clip,
            self.autocast,
            state.tally,
        )
        state.scheduler.step()
        state.update += 1

    def record_training(self) -> Record:
        """Write down the means over the updates since the last time."""
        return self._write(split="train", **self.state.tally.means())

    def record_validation(self) -> Record:
        """Look at the test set and write down what is seen."""
        loss, accuracy = evaluate(self.state.model, self.feed.test_batches(), self.autocast)
        return self._write(split="validation", loss=loss, accuracy=accuracy)

    def _write(self, **what: Any) -> Record:
        done = self.state.update
        record = Record(
            update=done,
            epoch=self.plan.epoch(done),
            lr=self.plan.rates(max(0, done - 1)).lr,
            distance=self.state.distance.distance().total,
            **what,
        )
        self.recorder.write(record)
        return record

    def save(self, every: float = 0.0) -> None:
        """Take a checkpoint, unless the last one is younger than ``every`` seconds."""
        now = time.monotonic()
        if now - self._saved < every:
            return
        self.state.seconds = now - self._began
        self.recorder.sync()
        self.folder.save({"state": self.state.state_dict(), "metrics": self.recorder.position()})
        self._saved = time.monotonic()

    def close(self) -> None:
        """Let go of the files, however the run went."""
        self.recorder.close()

    def end(self, last: Record) -> Summary:
        """Sum up, and write it down last of all."""
        sound = isfinite(last.loss) and isfinite(last.distance)
        status: Status = "finished" if sound and last.update == self.plan.updates else "diverged"
        summary = Summary(
            status=status,
            accuracy=last.accuracy,
            loss=last.loss,
            updates=last.update,
            epochs=last.epoch,
            distance=last.distance,
            seconds=time.monotonic() - self._began,
        )
        self.folder.end(summary)
        return summary
