"""Somebody's own PyTorch scheduler, adapted to another batch size."""

from collections import Counter
from copy import copy
from fractions import Fraction
from math import floor
from typing import Any, Literal, TypeVar, get_args

from torch.optim import Optimizer
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    LinearLR,
    LRScheduler,
    MultiStepLR,
    OneCycleLR,
    SequentialLR,
    StepLR,
)

from ghostbatch.errors import InputError, check_choice
from ghostbatch.optim.groups import set_option
from ghostbatch.optim.regime import exact
from ghostbatch.optim.scaling import Rule, lr_scale, rate_batch

Time = Literal["epochs", "updates"]
"""What a length counts."""
HeldTime = Literal["epochs", "updates", "rate"]
Scheduler = TypeVar("Scheduler", bound=LRScheduler)

LENGTHS: dict[type, tuple[str, ...]] = {
    StepLR: ("step_size",),
    MultiStepLR: ("milestones",),
    LinearLR: ("total_iters",),
    CosineAnnealingLR: ("T_max",),
    OneCycleLR: ("total_steps",),
    SequentialLR: ("_milestones",),
}
"""The attributes of each known scheduler that count its steps."""

RATES = ("initial_lr", "max_lr", "min_lr", "lr")
"""The learning rates that an optimizer and its schedulers keep in a parameter group."""


def adapt(
    scheduler: Scheduler,
    *,
    batch: int,
    base_batch: int,
    rule: Rule = "sqrt",
    hold: HeldTime = "epochs",
    unit: Time = "epochs",
    verbose: bool = True,
) -> Scheduler:
    """Return a PyTorch scheduler adapted to ``batch``; use it instead of the given one.

    Every learning rate of the optimizer and of the schedule is multiplied by ``lr_scale(batch,
    base_batch, rule)``, so parameter groups keep their ratios. Lengths in epochs are multiplied by
    batch / base_batch to hold the updates, and lengths in updates by base_batch / batch to hold the
    epochs. To hold the sum of the rates, updates are divided by `lr_scale`. Results are rounded to
    whole steps.

    Call it once, after the scheduler is built and before the first step or ``load_state_dict``. Of
    the optimizer it changes the rates only; see docs/large-batch.md for other settings of Adam.

    Args:
        scheduler: a MultiStepLR, StepLR, LinearLR, CosineAnnealingLR or OneCycleLR, or a
            SequentialLR of these, with the rates and lengths that were tuned for ``base_batch``.
        batch: samples per update, over all ranks.
        base_batch: the batch that the schedule was tuned for.
        rule: how the rates follow batch / base_batch: "sqrt", "linear" or "none".
        hold: what stays as it was at ``base_batch``. With "epochs" a loop over epochs does not
            change. With "updates" it must run for batch / base_batch times the epochs, and with
            "rate" for that number divided by `lr_scale`.
        unit: what the lengths of the schedule count: "updates" of ``base_batch``, or "epochs".
            Lengths computed from a loader that already has the large batch, as in
            ``epochs * len(loader)``, are epochs.
        verbose: print the schedule before and after.

    >>> import torch
    >>> optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    >>> schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [30, 60])
    >>> schedule = adapt(schedule, batch=512, base_batch=128, hold="updates")
    before: MultiStepLR(lr=0.1, milestones=30,60)
    after:  MultiStepLR(lr=0.2, milestones=120,240)

    """
    factor = lr_scale(batch, base_batch, rule)
    stretch = stretch_factor(batch, base_batch, rule, hold, unit)
    _check_known(scheduler)
    _check_unused(scheduler)
    adapted: Scheduler = _adapted(scheduler, factor, stretch)
    before = _show(scheduler)
    scale_rates(scheduler.optimizer, factor)
    if verbose:
        print(f"before: {before}\nafter:  {_show(adapted)}")
    return adapted


def stretch_factor(batch: int, base_batch: int, rule: Rule, hold: HeldTime, unit: Time) -> Fraction:
    """Return the factor of a length in epochs, or in updates of ``base_batch``, see `adapt`.

    >>> stretch_factor(512, 128, "sqrt", "rate", "epochs")  # half the updates of the small batch
    Fraction(2, 1)
    """
    check_choice("hold", hold, get_args(HeldTime))
    check_choice("unit", unit, get_args(Time))
    held = rate_batch(batch, base_batch, rule)
    if hold != "rate":
        held = batch if hold == "epochs" else base_batch
    return Fraction(batch if unit == "epochs" else base_batch) / held


def scale_rates(optimizer: Optimizer, factor: float) -> None:
    """Multiply the learning rates of all parameter groups by ``factor``, in place."""
    for name in RATES:
        groups = [group for group in optimizer.param_groups if name in group]
        scaled = [group[name] * factor for group in groups]  # groups may share one tensor
        for group, rate in zip(groups, scaled, strict=True):
            set_option(group, name, rate)


def _check_known(scheduler: LRScheduler) -> None:
    """Refuse a scheduler, or a part of a SequentialLR, whose rates and lengths are not known."""
    if type(scheduler) not in LENGTHS:
        known = ", ".join(kind.__name__ for kind in LENGTHS)
        problem = f"{type(scheduler).__name__} cannot be adapted, only {known}"
        other = "as a gb.Regime, scale that, and use gb.RegimeScheduler"
        raise InputError("scheduler", problem, f"write the schedule as one of these, or {other}")
    for part in _parts(scheduler):
        _check_known(part)


def _check_unused(scheduler: LRScheduler) -> None:
    """Refuse a scheduler that was stepped, or whose optimizer has other rates by now."""
    kind = type(scheduler).__name__
    if scheduler.last_epoch > 0:
        remedy = "adapt it where it is built, before load_state_dict"
        raise InputError("scheduler", f"this {kind} was stepped already", remedy)
    initial = [float(group["initial_lr"]) for group in scheduler.optimizer.param_groups]
    # A OneCycleLR sets rates of its own when it is built, after other parts of a SequentialLR.
    if all([*map(float, part.base_lrs)] != initial for part in _leaves(scheduler)):
        problem = f"the rates of its optimizer changed after this {kind} was built"
        remedy = "adapt a scheduler once, and several as one SequentialLR"
        raise InputError("scheduler", problem, remedy)


def _adapted(scheduler: Any, factor: float, stretch: Fraction) -> Any:
    """Return a copy on the same optimizer with scaled rates and stretched lengths."""
    adapted = copy(scheduler)
    adapted._last_lr = [rate * factor for rate in scheduler._last_lr]
    for name in LENGTHS[type(scheduler)]:
        setattr(adapted, name, _stretched(name, getattr(scheduler, name), stretch))
    if isinstance(scheduler, SequentialLR):
        adapted._schedulers = [_adapted(part, factor, stretch) for part in _parts(scheduler)]
        return adapted
    adapted.base_lrs = [rate * factor for rate in scheduler.base_lrs]
    if isinstance(scheduler, CosineAnnealingLR):
        adapted.eta_min = scheduler.eta_min * factor
    if isinstance(scheduler, OneCycleLR):
        adapted._schedule_phases = _stretched_phases(scheduler, adapted.total_steps)
    return adapted


def _stretched(name: str, length: Any, stretch: Fraction) -> Any:
    """Return a length, or a list or counter of lengths, times ``stretch``, half up."""
    if isinstance(length, Counter):
        return Counter(_stretched(name, list(length.elements()), stretch))
    if isinstance(length, list):
        return [_stretched(name, each, stretch) for each in length]
    steps = floor(exact(length) * stretch + Fraction(1, 2))
    if length and not steps:
        problem = f"{name.lstrip('_')} {length} would be less than one step at this batch"
        remedy = 'pass unit="epochs" if it counts epochs, or a longer schedule'
        raise InputError("scheduler", problem, remedy)
    return steps


def _stretched_phases(scheduler: OneCycleLR, total: int) -> list[dict[str, Any]]:
    """Return the phases of a OneCycleLR of ``total`` steps, as its constructor computes them."""
    phases: list[dict[str, Any]] = [dict(phase) for phase in scheduler._schedule_phases]
    for number, phase in enumerate(phases, start=1):
        early = 1 if number == len(phases) else number  # steps by which PyTorch ends a phase sooner
        phase["end_step"] = (phase["end_step"] + early) / scheduler.total_steps * total - early
    return phases


def _parts(scheduler: LRScheduler) -> list[LRScheduler]:
    return scheduler._schedulers if isinstance(scheduler, SequentialLR) else []


def _leaves(scheduler: LRScheduler) -> list[LRScheduler]:
    """Return the schedulers in a SequentialLR at any depth, or the scheduler itself."""
    parts = _parts(scheduler)
    return [leaf for part in parts for leaf in _leaves(part)] if parts else [scheduler]


def _show(scheduler: Any) -> str:
    """Return a scheduler with its rates and lengths on one line."""
    shown = []
    for name in LENGTHS[type(scheduler)]:
        length = getattr(scheduler, name)
        many = sorted(length.elements()) if isinstance(length, Counter) else length
        text = ",".join(map(str, many)) if isinstance(many, list) else str(many)
        shown.append(f"{name.lstrip('_')}={text}")
    if isinstance(scheduler, SequentialLR):
        inside = [_show(part) for part in _parts(scheduler)]
        return f"SequentialLR({', '.join([*inside, *shown])})"
    name, rates = "lr", scheduler.base_lrs
    if isinstance(scheduler, OneCycleLR):  # whose base_lrs are its initial rates
        name, rates = "max_lr", [group["max_lr"] for group in scheduler.optimizer.param_groups]
    first = f"{name}={','.join(f'{float(rate):.4g}' for rate in rates)}"
    return f"{type(scheduler).__name__}({', '.join([first, *shown])})"
