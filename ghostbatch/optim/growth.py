"""A batch that grows where the learning rate would drop, instead of a rate that falls."""

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

from ghostbatch.errors import check_positive
from ghostbatch.optim.regime import Drop, Regime, exact, update_at


def grow_batch(regime: Regime, batch: int, largest: int) -> tuple[Regime, tuple[int, ...]]:
    """Return the regime of a batch that grows to ``largest``, and each phase's batches per update.

    The noise of SGD follows rate / batch, so a batch k times as large stands in for a rate k times
    as small (Smith, Kindermans, Ying, Le 2018). Where the rate has fallen from lr_0 to lr_i, an
    update takes k_i batches, its gradient is their mean, and its rate is k_i lr_i:

        k_i = max(1, floor(min(lr_0 / lr_i, largest / batch)))

    So rate / batch is the given regime's in every phase, and the rate falls again where the batch
    is as large as it may be. Rates count as they are written: multiply them afterwards, by
    `Regime.scaled`. Drops keep their epochs and weight decay. `phase_updates` returns the updates
    of each phase. A warm-up must end before the first drop.

    >>> regime = Regime(lr=0.1, epochs=90, drops=((30, 0.01), (60, 1e-3)))
    >>> grown, batches = grow_batch(regime, batch=128, largest=4096)
    >>> batches, [grown.at(epoch).lr for epoch in (0, 30, 60)]
    ((1, 10, 32), [0.1, 0.1, 0.032])
    """
    check_positive(batch=batch, largest=largest)
    most = largest // batch
    batches, drops = [1], list[Drop]()
    for epoch, lr, *decay in regime.drops:
        ratio = exact(regime.lr) // exact(lr) if lr else most
        batches.append(max(1, min(ratio, most)))
        drops.append((epoch, float(exact(lr) * batches[-1]), *decay))  # type: ignore[arg-type]
    return replace(regime, drops=tuple(drops)), tuple(batches)


def phase_updates(
    regime: Regime, samples: int, batch: int | Fraction, batches: Sequence[int]
) -> tuple[int, ...]:
    """Return the updates of each phase of a regime, given the ``batches`` of an update in each.

    Where an update takes k_i batches, phase i begins after c_i batches. It ends near U_i, the batch
    at which the next phase would begin if every update took one (`update_at`):

        n_i = max(0, (U_i - c_i) / k_i), rounded half up;    c_0 = 0,  c_{i+1} = c_i + n_i k_i

    >>> regime = Regime(lr=0.1, epochs=90, drops=((30, 0.01), (60, 1e-3)))
    >>> phase_updates(regime, samples=50_000, batch=128, batches=(1, 10, 32))
    (11719, 1172, 366)
    """
    epochs = (*(drop[0] for drop in regime.drops), regime.epochs)
    updates: list[int] = []
    begun = 0
    for epoch, size in zip(epochs, batches, strict=True):
        left = update_at(epoch, samples, batch) - begun
        updates.append(max(0, update_at(left, samples=1, batch=size)))
        begun += updates[-1] * size
    return tuple(updates)
