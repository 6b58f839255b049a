"""Regimes as pure functions of time, with drops at exact updates."""

import json
from dataclasses import FrozenInstanceError
from fractions import Fraction
from math import floor, inf, nan

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ghostbatch.errors import InputError
from ghostbatch.optim import Rates, Regime, regime_from_dict, regime_to_dict, update_at
from ghostbatch.optim.regime import exact

PAPER = Regime(lr=0.1, epochs=200, drops=((81, 0.01), (122, 1e-3), (164, 1e-4)))
ALEXNET = Regime(
    lr=0.01,
    epochs=30,
    drops=((10, 5e-3), (15, 1e-3, 0.0), (20, 5e-4), (25, 1e-4)),
    weight_decay=5e-4,
)


@pytest.mark.parametrize(
    ("epoch", "lr"), [(0, 0.1), (80.99, 0.1), (81, 0.01), (122, 1e-3), (163, 1e-3), (200, 1e-4)]
)
def test_a_drop_is_in_force_from_its_own_epoch_on(epoch, lr):
    assert PAPER.at(epoch) == Rates(lr, 1e-4)


def test_a_triple_sets_the_weight_decay_and_later_pairs_inherit_it():
    decays = [ALEXNET.at(epoch).weight_decay for epoch in (0, 10, 14.9, 15, 20, 29)]
    assert decays == [5e-4, 5e-4, 5e-4, 0, 0, 0]
    assert ALEXNET.at(20).lr == 5e-4


def test_scaling_multiplies_every_rate_and_leaves_weight_decay_and_time():
    scaled = ALEXNET.scaled(4)
    for epoch in range(31):
        assert scaled.at(epoch).lr == pytest.approx(4 * ALEXNET.at(epoch).lr, rel=1e-15)
        assert scaled.at(epoch).weight_decay == ALEXNET.at(epoch).weight_decay
    assert [drop[0] for drop in scaled.drops] == [10, 15, 20, 25]
    assert (scaled.epochs, scaled.momentum) == (30, 0.9)


@given(st.fractions(min_value=Fraction(1, 50), max_value=50), st.fractions(0, 200))
def test_stretching_multiplies_every_time_and_leaves_the_rates(factor, epoch):
    regime = Regime(lr=0.1, epochs=200, drops=PAPER.drops, warmup=3)
    stretched = regime.stretched(factor)
    assert stretched.at(epoch * factor) == regime.at(epoch)
    assert Fraction(str(stretched.epochs)) == 200 * factor


def test_stretching_is_exact_so_there_and_back_is_the_same_regime():
    regime = Regime(lr=0.1, epochs=0.7, drops=((0.1, 0.01), (0.3, 0.001)), warmup=0.1)
    assert regime.stretched(Fraction(1, 3)).stretched(3) == regime
    assert regime.stretched(0.1).epochs == 0.07  # 0.7 * 0.1 in floats is 0.06999999999999999


def test_warm_up_rises_linearly_from_zero_and_then_stays_out_of_the_way():
    regime = Regime(lr=0.4, epochs=10, drops=((2, 0.2),), warmup=4)
    assert [regime.at(e).lr for e in (0, 1, 2, 3, 4, 9)] == pytest.approx(
        [0, 0.1, 0.1, 0.15, 0.2, 0.2]
    )
    by_update = [regime.at_update(u, samples=10, batch=5).lr for u in range(20)]
    assert by_update == pytest.approx([regime.at(u / 2).lr for u in range(20)])
    assert regime.at(1).weight_decay == 1e-4


def test_weight_decay_that_would_begin_at_a_drop_is_refused():
    """Groups without weight decay stay without."""
    with pytest.raises(
        InputError, match=r"^regime\.drops: weight decay 0\.5 after 0 would have no"
    ):
        Regime(lr=0.1, epochs=10, drops=((5, 0.01, 0.5),), weight_decay=0.0)


def test_drops_and_a_schedule_without_them_are_refused_together():
    with pytest.raises(
        InputError, match=r"^regime\.drops: schedule cosine has none; leave them out"
    ):
        Regime(lr=0.1, epochs=10, drops=((5, 0.01),), schedule="cosine")


@pytest.mark.parametrize("schedule", [{"schedule": "cosine"}, {"schedule": "polynomial"}], ids=str)
def test_a_schedule_is_scaled_and_stretched_as_drops_are(schedule):
    regime = Regime(lr=0.1, epochs=10, warmup=1, **schedule)
    assert regime.at(5.5).lr == pytest.approx(0.05)
    for epoch in (0, 0.5, 1, 4, 9.9, 10, 11):
        lr = regime.at(epoch).lr
        assert regime.scaled(4).at(epoch).lr == pytest.approx(4 * lr)
        assert regime.stretched(Fraction(1, 3)).at(Fraction(epoch) / 3).lr == pytest.approx(lr)
    by_update = [regime.at_update(u, samples=10, batch=5).lr for u in range(21)]
    assert by_update == pytest.approx([regime.at(u / 2).lr for u in range(21)])


def test_the_rate_of_an_update_changes_at_the_rounded_update_of_the_drop():
    regime = Regime(lr=1.0, epochs=3, drops=((1, 0.5), (2, 0.25)))
    # 10 samples at 4: epoch 1 is update 2.5, rounded half up to 3; epoch 2 is update 5.
    rates = [regime.at_update(u, samples=10, batch=4).lr for u in range(8)]
    assert rates == [1, 1, 1, 0.5, 0.5, 0.25, 0.25, 0.25]


def test_an_epoch_may_be_a_whole_number_of_numpy():
    regime = Regime(lr=0.1, epochs=4, drops=((np.int64(2), 0.01),))
    assert [regime.at(epoch).lr for epoch in np.arange(4)] == [0.1, 0.1, 0.01, 0.01]


def test_times_that_are_fractions_survive_json_and_rates_are_written_as_floats():
    times = {"epochs": Fraction(50, 3), "warmup": Fraction(2)}
    regime = Regime(lr=0.1, drops=((np.int64(5), Fraction(1, 32), 0),), **times)
    written = json.loads(json.dumps(regime_to_dict(regime)))
    assert (written["epochs"], written["warmup"]) == ("50/3", 2)
    assert written["drops"] == [[5, 0.03125, 0.0]]
    assert regime_from_dict(written) == regime


def test_a_number_is_exact_as_written_whatever_was_asked_before():
    """0.1 equals the binary fraction next to it, and a cache would take one for the other."""
    assert (exact(0.1), exact(Fraction(0.1))) == (Fraction(1, 10), Fraction(0.1))


def test_a_regime_is_frozen_and_hashable():
    with pytest.raises(FrozenInstanceError):
        PAPER.lr = 1.0
    assert len({PAPER, PAPER.scaled(1), PAPER.scaled(2)}) == 2


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("lr", value) for value in (-0.1, nan, inf)),
        *(("weight_decay", value) for value in (-1e-4, nan, inf)),
        *(("momentum", value) for value in (-0.1, 1, 1.5, nan)),
        *(("epochs", value) for value in (0, -1, nan, inf, Fraction(-1, 2))),
        *(("warmup", value) for value in (-1, 11, nan, inf)),
        ("schedule", "exponential"),
        *(("power", value) for value in (0, -1, nan, inf, 2)),  # 2: there is no polynomial
        ("drops", ((5,),)),
        ("drops", ((5, 0.1, 0.1, 0.1),)),
        ("drops", ((5, 0.1), (4, 0.01))),
        ("drops", ((5, 0.1), (5, 0.01))),
        ("drops", ((0, 0.1),)),
        ("drops", ((-1, 0.1),)),
        ("drops", ((10, 0.1),)),
        ("drops", ((11, 0.1),)),
        ("drops", ((nan, 0.1),)),
        ("drops", ((5, -0.1),)),
        ("drops", ((5, nan),)),
        ("drops", ((5, 0.1, -1e-4),)),
        ("drops", ((5, 0.1, inf),)),
    ],
)
def test_a_bad_field_is_refused_in_one_line_that_names_it(field, value):
    good = {"lr": 0.1, "epochs": 10}
    with pytest.raises(InputError) as raised:
        Regime(**{**good, field: value})
    assert raised.value.field == f"regime.{field}"
    assert str(raised.value).startswith(f"regime.{field}: ")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("factor", [-1, nan, inf, "a", None, 10**400], ids=lambda f: str(f)[:4])
@pytest.mark.parametrize("change", [PAPER.scaled, PAPER.stretched], ids=["scaled", "stretched"])
def test_a_regime_cannot_be_changed_by_what_is_no_factor(change, factor):
    with pytest.raises(InputError, match=r"^factor: .* is out of range; use a finite number"):
        change(factor)


@pytest.mark.parametrize(
    ("epoch", "samples", "batch", "update"),
    [
        (81, 50_000, 128, 31_641),
        (122, 50_000, 128, 47_656),
        (164, 50_000, 128, 64_063),  # 64062.5: half goes up, not to the even one
        (200, 50_000, 128, 78_125),
        (81, 50_000, 4096, 989),
        (200, 50_000, 4096, 2_441),
        (30, 1_281_167, 128, 300_274),
        (0, 50_000, 128, 0),
    ],
)
def test_epochs_of_the_papers_runs_fall_on_these_updates(epoch, samples, batch, update):
    assert update_at(epoch, samples, batch) == update


@pytest.mark.parametrize(
    ("epoch", "samples", "batch", "update"),
    [
        (18.4, 50_000, 128, 7_188),  # 7187.5 exactly; a float product falls short of it
        (32.3, 4_000, 32, 4_038),
        (16.4, 60_000, 128, 7_688),
    ],
)
def test_a_fractional_epoch_is_exact_where_floats_go_wrong(epoch, samples, batch, update):
    assert floor(epoch * samples / batch + 0.5) == update - 1
    assert update_at(epoch, samples, batch) == update


@given(st.integers(0, 10**6), st.sampled_from([1, 10, 1000]), st.integers(1, 10**7), st.data())
def test_updates_agree_with_integer_arithmetic(numerator, denominator, samples, data):
    batch = data.draw(st.integers(1, samples))
    expected = (2 * numerator * samples + denominator * batch) // (2 * denominator * batch)
    assert update_at(numerator / denominator, samples, batch) == expected
    assert update_at(Fraction(numerator, denominator), samples, batch) == expected
