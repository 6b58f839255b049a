"""A Lightning callback that adapts a module and its Trainer to a large batch.

It works with ``lightning`` and with ``pytorch_lightning``.
"""

from contextlib import suppress
from fractions import Fraction
from math import floor
from typing import Any

from torch import nn

from ghostbatch.diagnostics import GradientNoiseScale, WeightDistance
from ghostbatch.errors import InputError, check_positive, check_positive_or_none
from ghostbatch.nn import to_ghost
from ghostbatch.optim import RegimeScheduler, Rule, adapt, lr_scale, scale_rates
from ghostbatch.optim.adaptation import HeldTime, Time, stretch_factor
from ghostbatch.optional import import_lightning

DISTANCE = "weight_distance"
"""The name under which loggers get the distance of the weights from their initial values."""

NOISE_SCALE = "gradient_noise_scale"
"""The name under which loggers get the gradient noise scale."""


class LargeBatch(import_lightning().Callback):  # type: ignore[misc]  # whichever is installed
    """Adapts a fit that was tuned for ``base_batch`` to ``batch``; nothing else has to change.

    When a fit starts, it converts the batch norms of the module to ghost norms, scales the rates of
    its optimizers, adapts its schedulers with `ghostbatch.adapt`, and stretches the limits of the
    Trainer. During the fit, gradients are clipped, and the distance that the weights have walked is
    logged every ``Trainer(log_every_n_steps=...)`` updates as "weight_distance".

    Write ``configure_optimizers`` and the limits of the Trainer as for ``base_batch``, and give the
    loader the batch of one process: ``batch`` divided by the number of processes and by
    ``accumulate_grad_batches``. A `RegimeScheduler` is left as it is: scale its regime yourself.
    Checkpoints hold the adapted state; resume with the same callback.

    Args:
        batch: samples per update, over all processes and accumulated batches.
        base_batch: the batch that the module was tuned for.
        ghost: samples per ghost; None leaves the batch norms as they are.
        rule: how the rates follow batch / base_batch: "sqrt", "linear" or "none".
        hold: "epochs" leaves ``max_epochs`` as it is and divides ``max_steps`` by batch /
            base_batch; "updates" multiplies ``max_epochs`` by it and leaves ``max_steps``; "rate"
            keeps the sum of the rates, see `ghostbatch.adapt`.
        unit: what the lengths of a scheduler with ``interval="step"`` count. "epochs" if they were
            computed from the loader; "updates" if they count updates of ``base_batch``.
            ``trainer.estimated_stepping_batches`` comes from the loader, but with ``max_steps`` it
            is that number of updates.
        clip: largest L2 norm of the gradient; None does not clip. A Trainer with a
            ``gradient_clip_val`` of its own keeps it. With manual optimization, clip yourself.
        noise_scale: also estimate the gradient noise scale from the accumulated batches of all
            processes, two or more, and log it as "gradient_noise_scale" with the distance. It is
            an average since the fit began or was resumed; the attribute ``gradient_noise_scale``
            is the instrument, which has the interval.

    """

    def __init__(
        self,
        *,
        batch: int,
        base_batch: int,
        ghost: int | None = 128,
        rule: Rule = "sqrt",
        hold: HeldTime = "epochs",
        unit: Time = "epochs",
        clip: float | None = 5.0,
        noise_scale: bool = False,
    ) -> None:
        check_positive(batch=batch, base_batch=base_batch)
        check_positive_or_none(ghost=ghost)
        stretch_factor(batch, base_batch, rule, hold, unit)  # refuses what it does not know
        self.batch, self.base_batch, self.ghost = batch, base_batch, ghost
        self.rule, self.hold, self.unit, self.clip = rule, hold, unit, clip
        self.noise_scale = noise_scale
        self.gradient_noise_scale: GradientNoiseScale | None = None
        self._settings = {"batch": batch, "base_batch": base_batch, "rule": rule, "hold": hold}
        self._factor = lr_scale(batch, base_batch, rule)
        self._walked: WeightDistance | None = None
        self._saved: dict[str, Any] = {}
        self._measured = 0
        self._fits = False

    def setup(self, trainer: Any, pl_module: nn.Module, stage: str) -> None:
        """Forget what was restored before, for an evaluation or another fit."""
        del trainer, pl_module
        self._saved, self._fits = {}, stage == "fit"

    def on_fit_start(self, trainer: Any, pl_module: nn.Module) -> None:
        """Adapt the module, its optimizers and schedulers, and the Trainer."""
        if self.ghost is not None:
            to_ghost(pl_module, self.ghost)
        self._check_lengths(trainer)
        self._adapt_rates(trainer)
        self._stretch_limits(trainer.fit_loop)
        if trainer.gradient_clip_val is None and pl_module.automatic_optimization:
            if self.clip is not None and trainer.gradient_clip_algorithm == "value":
                problem = 'it is a norm, and gradient_clip_algorithm is "value"'
                raise InputError("clip", problem, "use None, or leave gradient_clip_algorithm out")
            trainer.gradient_clip_val = self.clip
        if self.noise_scale:
            self._start_noise_scale(trainer, pl_module)

    def on_train_start(self, trainer: Any, pl_module: nn.Module) -> None:
        """Measure from the first weights; refuse batches that do not make up ``batch``.

        By now Lightning has restored weights and callbacks under every strategy.
        """
        self._measured = trainer.global_step
        self._walked = WeightDistance(pl_module)
        if self._saved:
            self._walked.load_state_dict(self._saved)
        self._check_batch(trainer)

    def on_train_batch_start(
        self, trainer: Any, pl_module: nn.Module, batch: Any, batch_idx: int
    ) -> None:
        """Check the batch again in each epoch: other callbacks may change the accumulation."""
        del pl_module, batch
        if batch_idx == 0:
            self._check_batch(trainer)

    def _check_batch(self, trainer: Any) -> None:
        """Refuse a loader whose batches do not make up ``batch``, if it has a batch size."""
        loader = trainer.train_dataloader
        size = getattr(loader, "batch_size", None)
        size = size or getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
        ranks, parts = trainer.world_size, trainer.accumulate_grad_batches
        if isinstance(size, int) and size * ranks * parts != self.batch:
            made = f"{size} samples x {ranks} processes x {parts} accumulated"
            remedy = (
                f"give the loader {self.batch / ranks / parts:g}, or pass {size * ranks * parts}"
            )
            raise InputError("batch", f"{self.batch} is not the loader's {made}", remedy)

    def on_after_backward(self, trainer: Any, pl_module: nn.Module) -> None:
        """Note the gradients of one part of the batch."""
        del pl_module
        if self.gradient_noise_scale is not None:
            parts = trainer.world_size * trainer.accumulate_grad_batches
            self.gradient_noise_scale.part(self.batch // parts)

    def on_before_optimizer_step(self, *_: Any) -> None:
        """Estimate the noise scale of one batch, before its gradients are clipped."""
        if self.gradient_noise_scale is not None:
            with suppress(InputError):  # the last batch of an epoch may have a single part
                self.gradient_noise_scale.update()

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """Log the distance and the noise scale, every ``log_every_n_steps`` updates."""
        update, every = trainer.global_step, trainer.log_every_n_steps
        if not trainer.loggers or not every or update % every or update == self._measured:
            return
        assert self._walked is not None  # noqa: S101 (set when the fit started)
        self._measured = update
        values = {DISTANCE: self._walked.distance().total}  # on all ranks, as FSDP2 needs it
        if self.gradient_noise_scale is not None:
            values[NOISE_SCALE] = self.gradient_noise_scale.estimate().value
        for logger in trainer.loggers:
            logger.log_metrics(values, step=update)

    def state_dict(self) -> dict[str, Any]:
        """Return the initial weights, from which a resumed fit measures, too."""
        start = self._walked.state_dict() if self._walked is not None else dict(self._saved)
        return {**start, "settings": self._settings}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from the initial weights in a checkpoint, when the fit starts."""
        self._saved = dict(state_dict)
        settings = self._saved.pop("settings", self._settings)
        for name, value in self._settings.items() if self._fits else ():
            if settings[name] != value:
                problem = f"the checkpoint is of a fit with {name} {settings[name]}, not {value}"
                raise InputError(name, problem, "resume with the same callback")

    def on_load_checkpoint(
        self, trainer: Any, pl_module: nn.Module, checkpoint: dict[str, Any]
    ) -> None:
        """Refuse to resume a fit that had no such callback: its rates are not adapted."""
        del trainer, pl_module
        if self._fits and self.state_key not in checkpoint.get("callbacks", {}):
            problem = "it is of a fit without LargeBatch, whose rates are those of the base batch"
            raise InputError("ckpt_path", problem, "load its weights, and begin a new fit")

    def _start_noise_scale(self, trainer: Any, pl_module: nn.Module) -> None:
        """Measure the noise scale, where the gradients of two or more parts can be seen."""
        if trainer.world_size * trainer.accumulate_grad_batches < 2:
            remedy = "accumulate two or more batches, or use several processes"
            raise InputError("noise_scale", "a batch in one part does not show the noise", remedy)
        if trainer.precision == "16-mixed" or not pl_module.automatic_optimization:
            problem = "precision 16-mixed and manual optimization change the gradients in between"
            raise InputError("noise_scale", problem, "use gb.GradientNoiseScale in your module")
        self.gradient_noise_scale = GradientNoiseScale(trainer.strategy.model)

    def _check_lengths(self, trainer: Any) -> None:
        """Refuse a length that is ``max_steps``, which counts updates, where epochs are counted."""
        steps = trainer.fit_loop.epoch_loop.max_steps
        if self.unit != "epochs" or steps <= 0 or "max_steps" in _stretched(trainer.fit_loop):
            return
        for config in trainer.lr_scheduler_configs:
            lengths = (getattr(config.scheduler, name, 0) for name in ("total_steps", "T_max"))
            if config.interval == "step" and steps in lengths:
                problem = f"the scheduler is as long as max_steps, {steps}, which counts updates"
                raise InputError("unit", problem, 'pass unit="updates"')

    def _adapt_rates(self, trainer: Any) -> None:
        for config in trainer.lr_scheduler_configs:
            if isinstance(config.scheduler, RegimeScheduler):
                continue
            config.scheduler = adapt(
                config.scheduler,
                batch=self.batch,
                base_batch=self.base_batch,
                rule=self.rule,
                hold=self.hold,
                unit=self.unit if config.interval == "step" else "epochs",
                verbose=False,
            )
        scheduled = {id(config.scheduler.optimizer) for config in trainer.lr_scheduler_configs}
        for optimizer in trainer.optimizers:
            if id(optimizer) not in scheduled:
                scale_rates(optimizer, self._factor)

    def _stretch_limits(self, fit_loop: Any) -> None:
        """Stretch the limits, unless an earlier fit of this Trainer has done so."""
        stretched = _stretched(fit_loop)
        for loop, unit in ((fit_loop, "epochs"), (fit_loop.epoch_loop, "steps")):
            time: Time = "epochs" if unit == "epochs" else "updates"
            factor = stretch_factor(self.batch, self.base_batch, self.rule, self.hold, time)
            for name in (f"min_{unit}", f"max_{unit}"):
                limit = getattr(loop, name)
                if limit is None or limit <= 0 or limit == stretched.get(name):
                    continue  # no limit, or stretched already
                stretched[name] = max(1, floor(limit * factor + Fraction(1, 2)))
                setattr(loop, name, stretched[name])


def _stretched(fit_loop: Any) -> dict[str, int]:
    """Return the limits of a Trainer that were stretched, by any such callback."""
    found: dict[str, int] = vars(fit_loop).setdefault("_stretched_by_ghostbatch", {})
    return found
