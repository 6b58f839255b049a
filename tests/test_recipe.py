"""A recipe and its plan: what is held, what is scaled, what is refused."""

import json
import re
from dataclasses import FrozenInstanceError, replace
from fractions import Fraction
from math import isqrt, nan, sqrt

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ghostbatch import Recipe, Regime
from ghostbatch.errors import InputError
from ghostbatch.optim import SGD, LAMBSpec

REGIME = Regime(lr=0.1, epochs=200, drops=((81, 0.01), (122, 1e-3), (164, 1e-4)))
SMALL = Recipe(model="f1", data="digits", batch=128, base_batch=128, regime=REGIME)
SIZES = [
    (50_000, 4096, 128),
    (60_000, 4096, 128),
    (1_281_167, 8192, 128),
    (4_000, 1000, 32),
    (4_001, 997, 31),
    (101, 100, 7),
    (10, 3, 7),
]


def small(base):
    return replace(SMALL, batch=base, base_batch=base)


def half_up(epoch, samples, batch):
    return (2 * epoch * samples + batch) // (2 * batch)


@pytest.mark.parametrize(("samples", "batch", "base"), SIZES)
def test_regime_adaptation_has_the_updates_and_drops_of_the_small_batch(samples, batch, base):
    expected = small(base).plan(samples)
    adapted = small(base).large(batch, ghost=None).plan(samples)
    assert expected.updates == adapted.updates == half_up(200, samples, base)
    drops = tuple(half_up(epoch, samples, base) for epoch in (81, 122, 164))
    assert expected.drop_updates == adapted.drop_updates == drops


@given(st.integers(2, 10**6), st.integers(2, 10**4), st.integers(2, 10**4), st.data())
def test_small_batch_and_regime_adaptation_agree_for_any_sizes(samples, batch, base, data):
    batch, base = min(batch, samples), min(base, samples)
    tenths = data.draw(st.sets(st.integers(1, 1999), max_size=4))
    regime = Regime(lr=0.1, epochs=200, drops=tuple((t / 10, 0.01) for t in sorted(tenths)))
    recipe = replace(small(base), regime=regime)
    first, second = recipe.plan(samples), recipe.large(batch, ghost=None).plan(samples)
    assert (first.updates, first.drop_updates) == (second.updates, second.drop_updates)


@pytest.mark.parametrize(("samples", "batch", "base"), SIZES)
def test_without_regime_adaptation_the_epochs_are_held(samples, batch, base):
    plan = replace(small(base), batch=batch).plan(samples)
    assert plan.updates == half_up(200, samples, batch)
    assert plan.drop_updates == tuple(half_up(epoch, samples, batch) for epoch in (81, 122, 164))
    assert abs(plan.epoch(plan.updates) - 200) <= batch / samples / 2
    assert plan.seen == REGIME


@pytest.mark.parametrize(("samples", "batch", "base"), SIZES)
def test_regime_adaptation_sees_the_data_more_often_by_the_ratio_of_the_batches(
    samples, batch, base
):
    plan = small(base).large(batch, ghost=None, lr_rule="none").plan(samples)
    assert plan.seen.epochs == 200 * Fraction(batch, base)
    assert [drop[1] for drop in plan.seen.drops] == [0.01, 1e-3, 1e-4]
    assert abs(plan.epoch(plan.updates) - 200 * batch / base) <= batch / samples / 2 + 1e-9


@given(st.integers(2, 10**6), st.integers(2, 10**4), st.integers(2, 10**4), st.data())
def test_with_held_rate_and_square_roots_updates_are_rounded_exactly(samples, batch, base, data):
    """The oracle compares squares of whole numbers: (n - 1/2)^2 <= (e N)^2 / (B B_S)."""
    batch = min(batch, samples)
    tenths = data.draw(st.integers(10 * max(batch, base), 10**6))  # at least one update
    regime = Regime(lr=0.1, epochs=Fraction(tenths, 10))
    recipe = replace(small(base), regime=regime).large(batch, ghost=None, hold="rate")
    updates = (isqrt(4 * (tenths * samples) ** 2 // (100 * batch * base)) + 1) // 2
    assert recipe.plan(samples).updates == updates


@pytest.mark.parametrize(("samples", "batch", "base"), SIZES)
def test_with_held_rate_linear_scaling_holds_the_epochs_and_none_the_updates(samples, batch, base):
    for rule, hold in (("linear", "epochs"), ("none", "updates")):
        plan, twin = (
            small(base).large(batch, rule, ghost=None, hold=held).plan(samples)
            for held in ("rate", hold)
        )
        assert (plan.updates, plan.drop_updates) == (twin.updates, twin.drop_updates)
        assert plan.seen == twin.seen


@pytest.mark.parametrize("rule", ["none", "sqrt", "linear"])
def test_with_held_rate_the_sum_of_learning_rates_is_that_of_the_small_batch(rule):
    warm = replace(SMALL, regime=replace(REGIME, warmup=5))
    plans = [r.plan(5000) for r in (warm, warm.large(4096, rule, hold="rate"))]
    sums = [sum(plan.rates(u).lr for u in range(plan.updates)) for plan in plans]
    assert sums[1] == pytest.approx(sums[0], rel=1e-2)


def test_the_rates_of_a_plan_change_at_its_drops_and_follow_the_rule():
    for rule, factor in (("none", 1), ("sqrt", sqrt(32)), ("linear", 32)):
        plan = SMALL.large(4096, lr_rule=rule).plan(50_000)
        for update, before, after in zip(
            plan.drop_updates, (0.1, 0.01, 1e-3), (0.01, 1e-3, 1e-4), strict=True
        ):
            assert plan.rates(update - 1).lr == pytest.approx(before * factor)
            assert plan.rates(update).lr == pytest.approx(after * factor)
        assert plan.rates(0).weight_decay == 1e-4


def test_large_applies_the_papers_remedies_and_keeps_the_rest():
    adapted = SMALL.large()
    assert adapted == replace(SMALL, batch=4096, lr_rule="sqrt", ghost=128, hold="updates")
    assert adapted.regime is REGIME
    assert adapted.clip == 5.0


@pytest.mark.parametrize(("batch", "ghost", "ghosts"), [(4096, 128, 32), (100, 32, 3), (96, 96, 1)])
def test_a_plan_counts_its_ghosts(batch, ghost, ghosts):
    assert SMALL.large(batch, ghost=ghost).plan(5000).ghosts == ghosts
    assert SMALL.large(batch, ghost=None).plan(5000).ghosts == 1


EXACT = Regime(
    lr=0.1,
    epochs=Fraction(50, 3),
    drops=((Fraction(7, 3), 0.01), (4, 1e-3, 0.0), (5.5, 1e-4)),
    warmup=Fraction(1, 7),
)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"regime": Regime(lr=0.1, epochs=0.7, drops=((0.1, 0.01, 0.0), (0.3, 0.001)))},
        {"regime": EXACT, "noise": True, "clip": None, "running": "mean", "seed": 3},
        {"regime": Regime(lr=0.1, epochs=Fraction(50, 3), schedule="polynomial", power=2)},
        {"data": "imagenet", "image_size": 64},
        {"hold": "distance", "reference": "runs/small"},
        {"hold": "rate"},
        {"optimizer": SGD(nesterov=True)},
        {"optimizer": LAMBSpec(beta2=0.99)},
    ],
    ids=str,
)
def test_a_recipe_survives_json_exactly(changes):
    recipe = replace(SMALL.large(1000, ghost=50), **changes)
    back = Recipe.from_dict(json.loads(json.dumps(recipe.as_dict())))
    assert back == recipe
    assert hash(back) == hash(recipe)
    assert back.plan(4001) == recipe.plan(4001)


def test_a_recipe_is_frozen_and_keyword_only():
    with pytest.raises(FrozenInstanceError):
        SMALL.batch = 64
    with pytest.raises(TypeError, match="positional"):
        Recipe("f1", "digits", 128, 128, REGIME)


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("model", {"model": "f2"}),
        ("data", {"data": "letters"}),
        ("batch", {"batch": 1}),
        ("batch", {"batch": -128}),
        ("base_batch", {"base_batch": 0}),
        ("ghost", {"ghost": 1}),
        ("ghost", {"ghost": 129}),
        ("lr_rule", {"lr_rule": "cubic"}),
        ("running", {"running": "median"}),
        ("hold", {"hold": "seconds"}),
        ("precision", {"precision": "fp8"}),
        ("clip", {"clip": 0.0}),
        ("clip", {"clip": -5.0}),
        ("clip", {"clip": nan}),
        ("noise", {"noise": True, "batch": 64}),
        ("reference", {"hold": "distance"}),
        ("reference", {"hold": "distance", "reference": ""}),
        ("reference", {"reference": "runs/small"}),
        ("reference", {"reference": "runs/small", "hold": "updates"}),
        ("hold", {"hold": "distance", "reference": "runs/small", "regime": Regime(0.1, 1)}),
    ],
)
def test_a_bad_field_is_refused_in_one_line_that_names_it(field, changes):
    with pytest.raises(InputError) as raised:
        replace(SMALL, **changes)
    assert raised.value.field == field
    assert str(raised.value).startswith(f"{field}: ")
    assert "\n" not in str(raised.value)


def test_a_batch_above_the_training_set_is_refused_by_the_plan():
    with pytest.raises(InputError, match=r"^batch: 128 is above the 127 training samples"):
        SMALL.plan(127)
    assert SMALL.plan(128).updates == 200


def test_a_run_without_a_whole_update_is_refused_by_the_plan():
    recipe = replace(SMALL, regime=Regime(lr=0.1, epochs=0.1))
    with pytest.raises(InputError, match=r"^regime\.epochs: "):
        recipe.plan(639)  # 0.499 updates
    assert recipe.plan(640).updates == 1


def test_with_held_distance_a_run_has_twice_the_updates_at_most_before_its_last_phase():
    held = SMALL.large(4096).plan(50_000)
    followed = SMALL.large(4096, hold="distance", reference="runs/small").plan(50_000)
    assert followed.phases == held.phases
    assert sum(held.phases) == held.updates
    assert followed.drop_updates == tuple(2 * drop for drop in held.drop_updates)
    assert followed.updates == 2 * held.drop_updates[-1] + held.phases[-1]
    assert followed.rates(followed.drop_updates[0] - 1).lr == held.rates(0).lr
    assert followed.rates(followed.drop_updates[0]).lr == held.rates(held.drop_updates[0]).lr


def test_fields_that_an_older_version_did_not_write_count_as_their_default():
    written = SMALL.as_dict()
    new = ("decay_norms", "label_smoothing", "ema", "grow", "normalisation", "reset_momentum")
    for added in ("reference", "optimizer", "image_size", *new):
        del written[added]
    del written["regime"]["schedule"], written["regime"]["power"]
    assert SMALL.differences(written) == []
    assert replace(SMALL, optimizer=SGD(nesterov=True)).differences(written) == ["optimizer"]
    assert replace(SMALL, seed=1, clip=None).differences(written) == ["clip", "seed"]


def test_nesterov_momentum_needs_momentum():
    still = replace(SMALL.regime, momentum=0)
    with pytest.raises(InputError, match=r"^optimizer\.nesterov: needs momentum; set regime\.mom"):
        replace(SMALL, regime=still, optimizer=SGD(nesterov=True))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("optimizer", "sgd"),
        ("ema", "0.9"),
        ("label_smoothing", None),
        ("dropconnect", "x"),
        ("model", None),
        ("regime", 0.1),
        ("batch", "64"),
        ("batch", 64.0),
        ("seed", True),
        ("clip", "5"),
        ("augment", "no"),
        ("reference", 5),
    ],
)
def test_a_value_of_another_type_is_refused_by_its_field(field, value):
    with pytest.raises(InputError, match=rf"^{field}: {re.escape(repr(value))} is not "):
        replace(SMALL, **{field: value})


GROWING = replace(SMALL, grow=4096)


def test_a_batch_that_grows_takes_the_stream_in_order_and_whole():
    plan = GROWING.plan(50_000)
    assert plan.batches == (1, 10, 32, 32)
    batches = [number for update in range(plan.updates) for number in plan.stream(update)]
    assert batches == list(range(plan.length))
    assert abs(plan.length - SMALL.plan(50_000).updates) <= 16
    # Of 31,641, 47,656, 64,063 and 78,125 are left 16,015 / 10, 16,402 / 32 and 14,048 / 32.
    assert plan.phases == (31_641, 1602, 513, 439)
    starts = [len(plan.stream(update)) for update in (0, *plan.drop_updates)]
    assert starts == list(plan.batches)
    assert plan.images(plan.updates) == 128 * plan.length
    assert plan.epoch(plan.updates) == 128 * plan.length / 50_000


def test_a_batch_that_grows_keeps_rate_over_batch_in_every_phase():
    for rule in ("none", "sqrt"):
        recipe = replace(GROWING, batch=256, lr_rule=rule)
        plan, falling = recipe.plan(50_000), replace(recipe, grow=None).plan(50_000)
        for update in (0, *plan.drop_updates):
            start, size = plan.stream(update).start, len(plan.stream(update))
            rates, was = plan.rates(update), falling.rates(start + size // 2)
            assert rates.lr / size == pytest.approx(was.lr, rel=1e-12)
            assert rates.weight_decay == was.weight_decay


def test_a_warm_up_before_the_growth_stays_as_it_is():
    warm = replace(GROWING, regime=replace(REGIME, warmup=81))
    plans = [r.plan(5000) for r in (warm, replace(warm, grow=None))]
    rates = [[plan.rates(update) for update in range(3164)] for plan in plans]
    assert rates[0] == rates[1]


@pytest.mark.parametrize("drop", [0.001, 0.0019])
def test_a_phase_may_be_too_short_for_an_update(drop):
    recipe = replace(GROWING, regime=Regime(lr=0.1, epochs=2, drops=((drop, 0.01), (0.1, 0.001))))
    plan = recipe.plan(50_000)
    assert plan.phases == (round(drop * 50_000 / 128), 4, 23)
    assert plan.rates(0).lr == pytest.approx(0.1)


@pytest.mark.parametrize(
    "changes",
    [
        {"grow": 255},
        {"grow": 1},
        {"grow": 4096.0},
        {"regime": Regime(lr=0.1, epochs=9)},
        {"regime": Regime(lr=0.1, epochs=9, schedule="cosine")},
        {"regime": Regime(lr=0.1, epochs=9, drops=((3, 0.06),))},
        {"regime": replace(REGIME, warmup=81.5)},
        {"hold": "updates"},
        {"hold": "rate"},
        {"hold": "distance", "reference": "runs/small"},
        {"noise": True},
        {"ema": 0.9},
        {"optimizer": LAMBSpec()},
    ],
    ids=str,
)
def test_a_batch_that_cannot_grow_or_would_not_fit_the_rest_is_refused(changes):
    with pytest.raises(InputError, match=r"^grow: [^\n]+; [^\n]+$"):
        replace(GROWING, **changes)


def test_a_largest_batch_above_the_training_set_is_refused_by_the_plan():
    with pytest.raises(InputError, match=r"^grow: 4096 is above the 4095 training samples"):
        GROWING.plan(4095)
    assert max(GROWING.plan(4096).batches) == 32


@pytest.mark.parametrize("batch", [2, 3, 7, 40, 64, 100])
def test_an_epoch_begins_at_the_update_of_its_number(batch):
    plan = small(batch).plan(100)
    firsts = {half_up(epoch, 100, batch) for epoch in range(1, 100)}
    found = [update for update in range(40) if plan.begins_epoch(update)]
    assert found == sorted(each for each in firsts if each < 40)
