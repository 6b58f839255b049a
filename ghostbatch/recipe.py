"""Everything that decides the numbers of one run, and nothing that does not."""

from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from itertools import accumulate, pairwise
from math import isfinite
from typing import Any, Literal, get_args

from ghostbatch.data import find_dataset
from ghostbatch.errors import InputError
from ghostbatch.nn import find_model
from ghostbatch.ops import Running, ghost_sizes
from ghostbatch.optim import Epochs, Rates, Regime, Rule, lr_scale, update_at

Hold = Literal["epochs", "updates", "distance"]
Precision = Literal["fp32", "bf16", "fp64"]

LATEST = 2
"""With hold "distance", a phase ends after so many times the reference's updates at the latest.

The last phase has the reference's updates; so has one in which the reference was only settling.
"""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One run. Where it happens (device, folder, threads) is an argument of `train` instead."""

    model: str
    """Network: a name of ours, torchvision:NAME, timm:NAME or python:MODULE:FUNCTION."""

    data: str
    """Data set: a name of ours, folder:PATH or synthetic:SHAPE."""

    batch: int
    """Samples per update, over all ranks."""

    base_batch: int
    """The batch that the regime was tuned for."""

    regime: Regime
    """Rates over the epochs, as tuned for base_batch; lr_rule and hold adapt it."""

    lr_rule: Rule = "none"
    """How the learning rate follows batch / base_batch: by its root, linearly, or not at all."""

    noise: bool = False
    """Weigh each sample's loss by N(1, batch / base_batch - 1), instead of scaling the rate."""

    ghost: int | None = None
    """Samples per ghost of ghost batch norm; None is plain batch norm."""

    running: Running = "sequential"
    """How ghosts move the running statistics: one after the other, or by their mean."""

    hold: Hold = "epochs"
    """What stays as it was at base_batch: the epochs, the updates, or how far the weights walk."""

    reference: str | None = None
    """Folder of the run whose distances are followed: its drops are at base_batch's updates."""

    clip: float | None = 5.0
    """Largest norm of the whole gradient; None does not clip."""

    augment: bool = False
    """Random crops and flips of the training images."""

    precision: Precision = "fp32"
    """Arithmetic: fp32, bf16 autocast, or fp64."""

    seed: int = 0
    """Of the initial weights, the order of the samples and every other draw."""

    def __post_init__(self) -> None:
        find_model(self.model)
        find_dataset(self.data)
        _choose("lr_rule", self.lr_rule, get_args(Rule))
        _choose("running", self.running, get_args(Running))
        _choose("hold", self.hold, get_args(Hold))
        _choose("precision", self.precision, get_args(Precision))
        self._check_reference()
        for field in ("batch", "base_batch", "ghost"):
            size = getattr(self, field)
            if size is not None and not isinstance(size, int):
                raise InputError(field, f"{size!r} is no whole number", "give a number of samples")
            if size is not None and size < 2:
                raise InputError(field, f"{size} is below 2", "use 2 or more samples")
        if not isinstance(self.seed, int):
            raise InputError("seed", f"{self.seed!r} is no whole number", "use 0, for example")
        if self.ghost is not None and self.ghost > self.batch:
            raise InputError(
                "ghost", f"{self.ghost} is above batch {self.batch}", "use batch or less"
            )
        if self.noise and self.batch < self.base_batch:
            raise InputError(
                "noise", f"batch {self.batch} is below base_batch {self.base_batch}", "turn it off"
            )
        if self.clip is not None and not (isfinite(self.clip) and self.clip > 0):
            raise InputError("clip", f"{self.clip} is no norm", "use None to turn it off")

    def _check_reference(self) -> None:
        if self.hold != "distance":
            if self.reference is not None:
                raise InputError(
                    "reference", f"hold {self.hold} follows no run", "set hold to distance"
                )
        elif not (isinstance(self.reference, str) and self.reference):
            raise InputError(
                "reference", "hold distance follows a run", "name the folder of a small-batch run"
            )
        elif not self.regime.drops:
            raise InputError(
                "hold", "the regime has no drops that a distance could decide", "use updates"
            )

    def large(
        self,
        batch: int = 4096,
        lr_rule: Rule = "sqrt",
        ghost: int | None = 128,
        hold: Hold = "updates",
        reference: str | None = None,
    ) -> "Recipe":
        """The recipe adapted to a large batch, with the paper's three remedies."""
        changes = {"lr_rule": lr_rule, "ghost": ghost, "hold": hold, "reference": reference}
        return replace(self, batch=batch, **changes)  # type: ignore[arg-type]

    def plan(self, samples: int) -> "Plan":
        """What this recipe does on a training set of ``samples``, exactly."""
        if self.batch > samples:
            raise InputError(
                "batch",
                f"{self.batch} is above the {samples} training samples of {self.data}",
                f"use {samples} or less",
            )
        held = self.batch if self.hold == "epochs" else self.base_batch
        regime = self.regime.scaled(lr_scale(self.batch, self.base_batch, self.lr_rule))
        if update_at(regime.epochs, samples, held) < 1:
            raise InputError(
                "regime.epochs", f"{regime.epochs} make no whole update", "use more epochs"
            )
        return Plan(recipe=self, samples=samples, regime=regime, held_batch=held)

    def as_dict(self) -> dict[str, Any]:
        """The recipe as plain data for JSON; `from_dict` is the way back."""
        fields = dict(_plain(asdict(self)))
        if self.reference is None:  # as before there was one, so that old folders stay valid
            del fields["reference"]
        return fields

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> "Recipe":
        """Read what `as_dict` wrote."""
        regime = dict(fields["regime"])
        regime["drops"] = tuple((_epochs(epoch), *rates) for epoch, *rates in regime["drops"])
        for field in ("epochs", "warmup"):
            regime[field] = _epochs(regime[field])
        return cls(**{**fields, "regime": Regime(**regime)})


@dataclass(frozen=True)
class Plan:
    """A recipe on a training set of known size: the rates and the exact number of updates."""

    recipe: Recipe
    samples: int
    regime: Regime
    """Rates scaled by the recipe's rule; its epochs are those of ``held_batch``."""
    held_batch: int
    """The batch that counts the regime's epochs: batch if epochs are held, else base_batch."""

    @property
    def phases(self) -> tuple[int, ...]:
        """Updates of each phase of the regime, one more than it has drops."""
        epochs = (0, *(drop[0] for drop in self.regime.drops), self.regime.epochs)
        starts = [update_at(epoch, self.samples, self.held_batch) for epoch in epochs]
        return tuple(end - start for start, end in pairwise(starts))

    @property
    def updates(self) -> int:
        """Weight updates in all; if distance is held, at most."""
        return sum(self._longest)

    @property
    def drop_updates(self) -> tuple[int, ...]:
        """The 0-based updates before which the drops take effect; if distance is held, at most."""
        return tuple(accumulate(self._longest[:-1]))

    @property
    def _longest(self) -> tuple[int, ...]:
        """Each phase at its longest; the last one is as long as the reference's in any case."""
        factor = LATEST if self.recipe.hold == "distance" else 1
        *before, last = self.phases
        return (*(factor * phase for phase in before), last)

    @property
    def seen(self) -> Regime:
        """The regime in epochs of this run's own batch: what the data go through."""
        return self.regime.stretched(Fraction(self.recipe.batch, self.held_batch))

    @property
    def ghosts(self) -> int:
        """Groups that are normalised together in each batch; 1 for plain batch norm."""
        ghost = self.recipe.ghost
        return 1 if ghost is None else len(ghost_sizes(self.recipe.batch, ghost))

    def epoch(self, update: int) -> float:
        """Passes over the training set after so many updates."""
        return update * self.recipe.batch / self.samples

    def rates(self, update: int) -> Rates:
        """Learning rate and weight decay of one update."""
        drops = sum(1 for drop in self.drop_updates if drop <= update)
        return self.regime.in_phase(drops, update, self.samples, self.held_batch)


def _choose(field: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise InputError(field, f"{value!r} is unknown", f"choose one of {', '.join(choices)}")


def _plain(value: Any) -> Any:
    """JSON's own types; a fraction becomes text such as 50/3."""
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return str(value) if isinstance(value, Fraction) else value


def _epochs(value: Epochs | str) -> Epochs:
    return Fraction(value) if isinstance(value, str) else value
