"""A batch that grows instead of a rate that falls: factors, rates and updates of its phases."""

from fractions import Fraction
from itertools import accumulate, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ghostbatch import Regime, RegimeScheduler
from ghostbatch.errors import InputError
from ghostbatch.optim import grow_batch, phase_updates, update_at
from ghostbatch.optim.regime import exact


def regime(*rates, epochs=40):
    """Return a regime with these rates, one for each ten epochs."""
    drops = tuple((10 * number, *drop) for number, drop in enumerate(rates[1:], start=1))
    return Regime(lr=rates[0][0], epochs=epochs, drops=drops)


@pytest.mark.parametrize(
    ("rates", "largest", "batches", "grown"),
    [
        ((0.1, 0.01, 1e-3, 1e-4), 4096, (1, 10, 32, 32), (0.1, 0.1, 0.032, 0.0032)),
        ((0.1, 0.02, 4e-3, 8e-4), 4096, (1, 5, 25, 32), (0.1, 0.1, 0.1, 0.0256)),
        ((0.3, 0.1), 4096, (1, 3), (0.3, 0.3)),  # 0.3 / 0.1 is below 3 in floats
        ((0.1, 0.04), 4096, (1, 2), (0.1, 0.08)),
        ((0.1, 0.01), 1000, (1, 7), (0.1, 0.07)),
        ((0.1, 0.06), 4096, (1, 1), (0.1, 0.06)),
        ((0.1, 0.01), 255, (1, 1), (0.1, 0.01)),
        ((0.1, 0.01), 64, (1, 1), (0.1, 0.01)),
        ((1e-3, 1e-2, 1e-3, 1e-4), 4096, (1, 1, 1, 10), (1e-3, 1e-2, 1e-3, 1e-3)),
        ((0.1, 0.0), 4096, (1, 32), (0.1, 0.0)),
        ((0.1,), 4096, (1,), (0.1,)),
    ],
)
def test_the_batch_grows_by_whole_batches_and_the_rate_by_the_same_factor(
    rates, largest, batches, grown
):
    found, factors = grow_batch(regime(*((lr,) for lr in rates)), batch=128, largest=largest)
    assert factors == batches
    assert tuple(found.phase(drops).lr for drops in range(len(rates))) == grown


def test_drops_keep_their_epochs_and_weight_decay_and_the_rest_of_the_regime_stays():
    before = Regime(lr=0.1, epochs=9.5, drops=((3, 0.01, 0.0), (4.5, 1e-3)), warmup=2)
    grown, _ = grow_batch(before, batch=128, largest=4096)
    drops = ((3, 0.1, 0.0), (4.5, 0.032))
    assert grown == Regime(lr=0.1, epochs=9.5, drops=drops, warmup=2)


@pytest.mark.parametrize("sizes", [(0, 4096), (128, 0)])
def test_sizes_below_one_are_refused(sizes):
    with pytest.raises(InputError, match=f"^{'batch' if sizes[1] else 'largest'}: "):
        grow_batch(regime((0.1,)), *sizes)


FALLING = st.lists(st.integers(1, 10**6), min_size=1, max_size=5).map(
    lambda rates: regime(*((rate / 10**6,) for rate in sorted(rates, reverse=True)), epochs=77)
)


@given(FALLING, st.integers(1, 500), st.integers(1, 10**5))
def test_the_noise_is_the_regimes_and_the_batch_as_large_as_allowed(before, batch, largest):
    grown, factors = grow_batch(before, batch, largest)
    assert all(now <= then for now, then in pairwise(factors))
    for drops, factor in enumerate(factors):
        was, now = before.phase(drops).lr, grown.phase(drops).lr
        assert now == float(exact(was) * factor)  # so rate / batch is kept, exactly as written
        assert exact(now) <= exact(before.lr)
        assert factor == 1 or factor * batch <= largest
        too_far = (factor + 1) * exact(was) > exact(before.lr) or (factor + 1) * batch > largest
        assert too_far


@given(FALLING, st.integers(1, 300), st.integers(1, 10**4), st.integers(1, 10**5))
def test_phases_begin_and_end_within_half_an_update_of_the_regimes(before, batch, factor, samples):
    _, factors = grow_batch(before, batch, factor * batch)
    updates = phase_updates(before, samples, batch, factors)
    done = accumulate(count * factor for count, factor in zip(updates, factors, strict=True))
    ends = [update_at(epoch, samples, batch) for epoch in (*(d[0] for d in before.drops), 77)]
    for end, reached, size in zip(ends, done, factors, strict=True):
        assert -Fraction(size, 2) < reached - end <= Fraction(size, 2)


def test_without_growth_phases_have_the_regimes_updates():
    before = regime((0.1,), (0.01,), (1e-3,), epochs=33.3)
    updates = phase_updates(before, 50_000, 128, (1, 1, 1))
    assert tuple(accumulate(updates)) == tuple(update_at(e, 50_000, 128) for e in (10, 20, 33.3))


def test_the_scheduler_drops_after_the_updates_of_each_phase():
    before = regime((0.1,), (0.01, 0.5), (1e-3,), epochs=30)
    grown, factors = grow_batch(before, batch=10, largest=320)
    phases = phase_updates(before, 100, 10, factors)
    assert (factors, phases) == ((1, 10, 32), (100, 10, 3))
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1, weight_decay=1e-4)
    scheduler = RegimeScheduler(optimizer, grown, samples_per_epoch=100, batch=10, phases=phases)
    with pytest.raises(InputError, match=r"^phases: 2 phases for 2 drops of the regime; "):
        RegimeScheduler(optimizer, grown, samples_per_epoch=100, batch=10, phases=(1, 2))
    rates = []
    for _ in range(sum(phases)):
        group = optimizer.param_groups[0]
        rates.append((group["lr"], group["weight_decay"]))
        optimizer.step()
        scheduler.step()
    assert rates == [(0.1, 1e-4)] * 100 + [(0.1, 0.5)] * 10 + [(0.032, 0.5)] * 3


def test_phases_decide_the_drops_during_a_warm_up_too():
    warming = Regime(lr=0.1, epochs=20, drops=((10, 0.01, 0.5),), warmup=8)
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1, weight_decay=1e-4)
    sizes = {"samples_per_epoch": 100, "batch": 10}  # so the warm-up ends at update 80
    scheduler = RegimeScheduler(optimizer, warming, **sizes, phases=(60, 40))
    assert [scheduler.rates(u).weight_decay for u in (59, 60, 80)] == [1e-4, 0.5, 0.5]
