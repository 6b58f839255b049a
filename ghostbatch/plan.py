"""The exact rates, updates and batches of a recipe on a training set of known size."""

from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import accumulate
from math import ceil
from typing import TYPE_CHECKING

from ghostbatch.ops import ghost_count
from ghostbatch.optim import Rates, Regime, phase_updates

if TYPE_CHECKING:
    from ghostbatch.recipe import Recipe

LATEST = 2
"""With hold "distance", a phase ends after at most this multiple of the reference's updates.

The last phase, and any in which the reference's distance hardly grew, has exactly the reference's
updates.
"""


@dataclass(frozen=True)
class Plan:
    """A recipe on a training set of known size: its rates and its exact number of updates."""

    recipe: "Recipe"
    samples: int
    regime: Regime
    """The regime with the rates of this run; its epochs are those of ``held_batch``."""
    held_batch: int | Fraction
    """The batch that converts epochs to updates: batch if epochs are held, `rate_batch` if the
    sum of the learning rates is, else base_batch."""

    @cached_property
    def phases(self) -> tuple[int, ...]:
        """Updates of each phase of the regime; a drop ends a phase."""
        return phase_updates(self.regime, self.samples, self.held_batch, self.batches)

    @cached_property
    def batches(self) -> tuple[int, ...]:
        """Batches that an update of each phase takes; 1 unless the batch grows."""
        return self.recipe.grown[1]

    @property
    def length(self) -> int:
        """Batches of the run in all: its updates, unless the batch grows."""
        return self.stream(self.updates).start

    @property
    def updates(self) -> int:
        """Weight updates in all; an upper bound if the distance is held."""
        return sum(self._longest)

    @property
    def drop_updates(self) -> tuple[int, ...]:
        """The 0-based updates at which the rate drops; upper bounds if the distance is held."""
        return tuple(accumulate(self._longest[:-1]))

    @property
    def _longest(self) -> tuple[int, ...]:
        """The largest number of updates of each phase; the last phase has a fixed length."""
        factor = LATEST if self.recipe.hold == "distance" else 1
        *before, last = self.phases
        return (*(factor * phase for phase in before), last)

    @property
    def seen(self) -> Regime:
        """The regime with times in epochs of this run's batch."""
        return self.regime.stretched(Fraction(self.recipe.batch, self.held_batch))

    @property
    def ghosts(self) -> int:
        """Ghosts per batch of the stream; 1 for plain batch norm."""
        ghost = self.recipe.ghost
        return 1 if ghost is None else ghost_count(self.recipe.batch, ghost)

    def epoch(self, update: int) -> float:
        """Return the epochs done after ``update`` updates."""
        return self.images(update) / self.samples

    def images(self, update: int) -> int:
        """Return the training images seen in ``update`` updates."""
        return self.stream(update).start * self.recipe.batch

    def stream(self, update: int) -> range:
        """Return which batches of the stream of samples the 0-based ``update`` takes."""
        begun = 0
        for updates, size in zip(self.phases, self.batches, strict=True):
            if update < updates:
                break
            begun, update = begun + updates * size, update - updates
        return range(begun + update * size, begun + (update + 1) * size)

    def begins_epoch(self, update: int) -> bool:
        """Return whether the 0-based ``update`` is the first of an epoch, but not of the run."""

        def epochs(update: int) -> int:  # that have begun: 1 + the largest e with update_at(e) <= b
            twice = 2 * self.stream(update).start + 1
            return ceil(Fraction(twice * self.recipe.batch, 2 * self.samples))

        return update > 0 and epochs(update) > epochs(update - 1)

    def rates(self, update: int) -> Rates:
        """Return learning rate and weight decay of the 0-based ``update``."""
        drops = sum(1 for drop in self.drop_updates if drop <= update)
        return self.regime.in_phase(drops, update, self.samples, self.held_batch)
