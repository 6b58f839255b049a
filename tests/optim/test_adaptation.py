"""An adapted scheduler is the one that would be built by hand, at every step."""

from functools import partial

import pytest
import torch
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    CosineAnnealingLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    MultiStepLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)

import ghostbatch as gb

SIZES = {"batch": 512, "base_batch": 128}  # four times, so the square root is 2
TWO_GROUPS = (0.1, 0.02)


def optimizer_of(lrs=TWO_GROUPS, kind=torch.optim.SGD, **options):
    groups = [{"params": [torch.zeros(1, requires_grad=True)], "lr": lr} for lr in lrs]
    return kind(groups, **{"lr": lrs[0], **options})


def multi_step(optimizer, _rate, stretch):
    return MultiStepLR(optimizer, [stretch(8), stretch(8), stretch(20)], gamma=0.3)


def step(optimizer, _rate, stretch):
    return StepLR(optimizer, stretch(12), gamma=0.5)


def linear(optimizer, _rate, stretch):
    return LinearLR(optimizer, start_factor=0.2, end_factor=0.9, total_iters=stretch(10))


def cosine(optimizer, rate, stretch):
    return CosineAnnealingLR(optimizer, stretch(40), eta_min=rate(0.001))


def one_cycle(optimizer, rate, stretch, **options):
    return OneCycleLR(optimizer, [rate(0.1), rate(0.02)], total_steps=stretch(40), **options)


def sequential(optimizer, rate, stretch):
    parts = [part(optimizer, rate, stretch) for part in (linear, cosine, step)]
    return SequentialLR(optimizer, parts, [stretch(10), stretch(20)])


def nested(optimizer, rate, stretch):
    parts = [sequential(optimizer, rate, stretch), multi_step(optimizer, rate, stretch)]
    return SequentialLR(optimizer, parts, [stretch(30)])


def warmup_then_one_cycle(optimizer, rate, stretch):
    parts = [linear(optimizer, rate, stretch), one_cycle(optimizer, rate, stretch)]
    return SequentialLR(optimizer, parts, [stretch(10)])


SCHEDULES = {
    "MultiStepLR": multi_step,
    "StepLR": step,
    "LinearLR": linear,
    "CosineAnnealingLR": cosine,
    "OneCycleLR": one_cycle,
    "OneCycleLR, three phases": partial(one_cycle, three_phase=True, pct_start=0.4),
    "OneCycleLR, linear": partial(one_cycle, anneal_strategy="linear", cycle_momentum=False),
    "SequentialLR": sequential,
    "SequentialLR in one": nested,
    "SequentialLR with OneCycleLR": warmup_then_one_cycle,
}
HELD = {  # hold, unit, what becomes of a length
    "epochs of epochs": ("epochs", "epochs", lambda n: n),
    "updates of epochs": ("updates", "epochs", lambda n: 4 * n),
    "epochs of updates": ("epochs", "updates", lambda n: (n + 2) // 4),
    "updates of updates": ("updates", "updates", lambda n: n),
    # Rates are twice as large, so half the updates are needed, which take twice the epochs.
    "rate of epochs": ("rate", "epochs", lambda n: 2 * n),
    "rate of updates": ("rate", "updates", lambda n: (n + 1) // 2),
}


def rates(scheduler, steps):
    """Step a scheduler; return the rates and momenta of all groups before each step."""
    optimizer, history = scheduler.optimizer, []
    for _ in range(steps):
        groups = optimizer.param_groups
        history += [value for g in groups for value in (float(g["lr"]), g.get("momentum", 0.0))]
        assert scheduler.get_last_lr() == [group["lr"] for group in groups]
        optimizer.step()
        scheduler.step()
    return history


# PyTorch steps a SequentialLR that is inside another one when it builds that.
@pytest.mark.filterwarnings(r"ignore:Detected call of `lr_scheduler.step\(\)` before")
@pytest.mark.parametrize(("hold", "unit", "stretch"), HELD.values(), ids=HELD)
@pytest.mark.parametrize("build", SCHEDULES.values(), ids=SCHEDULES)
def test_the_adapted_schedule_is_the_one_built_by_hand_at_every_step(build, hold, unit, stretch):
    optimizer = optimizer_of(momentum=0.9)
    own = build(optimizer, lambda rate: rate, lambda n: n)
    adapted = gb.adapt(own, **SIZES, hold=hold, unit=unit)
    by_hand = build(optimizer_of((0.2, 0.04), momentum=0.9), lambda rate: 2 * rate, stretch)
    assert type(adapted) is type(own)
    assert adapted.optimizer is optimizer
    steps = stretch(40)
    expected = rates(by_hand, steps)
    assert rates(adapted, steps) == pytest.approx(expected, rel=1e-9)
    assert len(set(expected)) > 3


@pytest.mark.parametrize(("rule", "factor"), [("sqrt", 2), ("linear", 4), ("none", 1)])
def test_every_group_is_scaled_by_the_rule_and_the_optimizer_keeps_its_weights(rule, factor):
    optimizer = optimizer_of(kind=torch.optim.AdamW)
    weights = [group["params"][0] for group in optimizer.param_groups]
    betas = [group["betas"] for group in optimizer.param_groups]
    gb.adapt(cosine(optimizer, float, int), **SIZES, rule=rule)
    groups = optimizer.param_groups
    assert [group["lr"] for group in groups] == pytest.approx([factor * 0.1, factor * 0.02])
    assert all(group["params"][0] is w for group, w in zip(groups, weights, strict=True))
    assert [group["betas"] for group in groups] == betas


def test_a_smaller_batch_lowers_the_rate_and_shortens_the_epochs_that_hold_the_updates():
    own = MultiStepLR(optimizer_of(), [8, 20])
    adapted = gb.adapt(own, batch=32, base_batch=128, hold="updates")
    assert sorted(adapted.milestones) == [2, 5]
    assert adapted.get_last_lr() == pytest.approx([0.05, 0.01])
    assert sorted(own.milestones) == [8, 20]  # the given one still tells what it was


def test_lengths_are_rounded_half_up_in_rational_arithmetic():
    adapted = gb.adapt(
        MultiStepLR(optimizer_of(), [50, 70, 31_641]), batch=100, base_batch=1, unit="updates"
    )
    assert list(adapted.milestones.elements()) == [1, 1, 316]


def test_a_rate_in_a_tensor_that_groups_share_is_scaled_once_and_in_place():
    rate = torch.tensor(0.1)
    optimizer = optimizer_of((rate, rate))
    adapted = gb.adapt(MultiStepLR(optimizer, [3]), **SIZES)
    assert all(group["lr"] is rate for group in optimizer.param_groups)
    assert rates(adapted, 4)[::4] == pytest.approx([0.2, 0.2, 0.2, 0.02], rel=1e-6)


def test_an_adapted_schedule_resumes_from_its_state(tmp_path):
    def build(adapt=True):
        own = sequential(optimizer_of(), float, int)
        return gb.adapt(own, **SIZES, hold="updates") if adapt else own

    whole = rates(build(), 100)
    first = build()
    rates(first, 33)
    parts = [first.optimizer.state_dict(), first.state_dict()]
    torch.save(parts, tmp_path / "state.pt")
    saved = torch.load(tmp_path / "state.pt", weights_only=True)
    second = build()
    second.optimizer.load_state_dict(saved[0])
    second.load_state_dict(saved[1])
    assert rates(second, 67) == pytest.approx(
        whole[33 * 4 :]
    )  # a rate and a momentum of two groups


REFUSED = {
    "LambdaLR": lambda o: LambdaLR(o, lambda _: 1.0),
    "ExponentialLR": lambda o: ExponentialLR(o, 0.9),
    "ReduceLROnPlateau": ReduceLROnPlateau,
    "ChainedScheduler": lambda o: ChainedScheduler([StepLR(o, 3), StepLR(o, 5)]),
    "RegimeScheduler": lambda o: gb.RegimeScheduler(
        o, gb.Regime(lr=0.1, epochs=2), samples_per_epoch=10, batch=1
    ),
    "Own": lambda o: type("Own", (StepLR,), {})(o, 3),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("inside", [False, True], ids=["alone", "in a SequentialLR"])
def test_another_scheduler_is_refused_by_name_and_nothing_changes(name, inside):
    optimizer = optimizer_of()
    scheduler = REFUSED[name](optimizer)
    if inside and name not in ("ReduceLROnPlateau", "ChainedScheduler"):  # PyTorch refuses them
        scheduler = SequentialLR(optimizer, [scheduler, StepLR(optimizer, 9)], [5])
    with pytest.raises(gb.InputError, match=rf"scheduler: {name} cannot .*MultiStep.*gb\.Regime,"):
        gb.adapt(scheduler, **SIZES)
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.02]


@pytest.mark.parametrize("build", [multi_step, sequential, one_cycle])
def test_a_scheduler_that_was_stepped_or_adapted_is_refused(build):
    scheduler = build(optimizer_of(momentum=0.9), float, int)
    gb.adapt(scheduler, **SIZES)
    with pytest.raises(gb.InputError, match="rates of its optimizer changed after this"):
        gb.adapt(scheduler, **SIZES)
    stepped = build(optimizer_of(momentum=0.9), float, int)
    rates(stepped, 1)
    with pytest.raises(gb.InputError, match=r"stepped already; adapt it where it is built"):
        gb.adapt(stepped, **SIZES)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"hold": "distance"}, "hold: 'distance' is unknown"),
        ({"unit": "step"}, "unit: 'step' is unknown"),
        ({"rule": "cubic"}, "lr_rule: 'cubic' is unknown"),
        ({"batch": 0}, "batch: 0 is below 1"),
        ({"batch": 6400, "unit": "updates"}, "step_size 12 would be less than one step"),
    ],
)
def test_wrong_input_is_refused_with_its_field_and_nothing_changes(options, line):
    optimizer = optimizer_of()
    with pytest.raises(gb.InputError, match=line):
        gb.adapt(step(optimizer, float, int), **{**SIZES, **options})
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.02]


def test_the_schedule_before_and_after_is_printed_unless_it_is_not_wanted(capsys):
    gb.adapt(sequential(optimizer_of(), float, int), **SIZES, hold="updates", verbose=False)
    assert capsys.readouterr().out == ""
    gb.adapt(warmup_then_one_cycle(optimizer_of(momentum=0.9), float, int), **SIZES)
    assert capsys.readouterr().out == (
        "before: SequentialLR(LinearLR(lr=0.1,0.02, total_iters=10), "
        "OneCycleLR(max_lr=0.1,0.02, total_steps=40), milestones=10)\n"
        "after:  SequentialLR(LinearLR(lr=0.2,0.04, total_iters=10), "
        "OneCycleLR(max_lr=0.2,0.04, total_steps=40), milestones=10)\n"
    )
