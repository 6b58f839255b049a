"""Everything that decides the numbers of one run, and nothing that does not."""

from dataclasses import asdict, dataclass, field, fields, replace
from fractions import Fraction
from math import isfinite
from typing import Any, Literal

import torch

from ghostbatch.data import Normalisation, check_holdout, check_image_size, find_dataset
from ghostbatch.errors import InputError, check_types
from ghostbatch.nn import find_model
from ghostbatch.ops import Running
from ghostbatch.optim import (
    SGD,
    OptimizerSpec,
    Regime,
    Rule,
    grow_batch,
    lr_scale,
    rate_batch,
    regime_from_dict,
    regime_to_dict,
    spec_from_dict,
    spec_to_dict,
)
from ghostbatch.optim.average import check_decay
from ghostbatch.optim.optimizers import check_spec
from ghostbatch.optim.regime import exact
from ghostbatch.plan import LATEST, Plan

__all__ = ["LATEST", "Hold", "Init", "Plan", "Precision", "Recipe"]

Hold = Literal["epochs", "updates", "distance", "rate"]
Init = Literal["network", "glorot"]
Precision = Literal["fp32", "bf16", "fp64"]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that decides the numbers of one run; `train` takes the device and the folder."""

    model: str
    """Network: a name of ours, torchvision:NAME, timm:NAME or python:MODULE:FUNCTION."""

    data: str
    """Data set: a name of ours, folder:PATH or synthetic:SHAPE."""

    image_size: int | None = None
    """Side of the images that the network sees; only image folders take it. None is 224."""

    holdout: int = 0
    """Training images that are kept aside and evaluated in place of the test set; 0 is none."""

    normalisation: Normalisation = "data"
    """Mean and deviation that pixels are normalised with: those of the data set, or the paper's
    authors': ImageNet's for colour images, half the range for grey ones."""

    batch: int
    """Samples per update, over all ranks."""

    base_batch: int
    """The batch that the regime was tuned for."""

    regime: Regime
    """Rates over the epochs, as tuned for base_batch; lr_rule and hold adapt it."""

    optimizer: OptimizerSpec = field(default_factory=SGD)
    """Which optimizer uses the regime's rates."""

    reset_momentum: bool = False
    """Start every epoch with zero momentum: the authors' code rebuilds its optimizer at each."""

    decay_norms: bool = True
    """Decay all parameters; if not, norms and biases have no weight decay."""

    lr_rule: Rule = "none"
    """How the learning rate follows batch / base_batch: square root, linear, or constant."""

    noise: bool = False
    """Weight each sample's loss by N(1, batch / base_batch - 1), instead of scaling the rate."""

    label_noise: float = 0.0
    """Probability that a sample's label is replaced by a random class, drawn for each update."""

    label_smoothing: float = 0.0
    """Part of each label that is spread over all classes; recorded losses are without it."""

    dropconnect: float = 0.0
    """Probability that a weight of a linear or convolutional layer is dropped in an update."""

    ghost: int | None = None
    """Samples per ghost of ghost batch norm; None is plain batch norm."""

    running: Running = "sequential"
    """How ghosts update the running statistics: one after the other, or once by their mean."""

    hold: Hold = "epochs"
    """What stays as it was at base_batch: epochs, updates, weight distance at each drop, or the sum
    of the learning rates: with "rate" the updates are those of base_batch divided by the factor of
    lr_rule."""

    reference: str | None = None
    """With hold "distance": folder of the small-batch run whose distances decide the drops."""

    grow: int | None = None
    """Largest batch to which the batch grows where the rate would drop; None: the rate drops. An
    update takes several consecutive batches, and its gradient is their mean (`grow_batch`). Ghosts
    stay as they are; plain batch norm normalises each of these batches by itself."""

    clip: float | None = 5.0
    """Largest L2 norm of the gradient over all parameters; None does not clip."""

    ema: float | None = None
    """Decay of an average of the weights over an update of base_batch; None keeps no average. Over
    one of batch it is ema ** (batch / base_batch): the same number of images at every batch."""

    augment: bool = False
    """Random crops and flips of the training images."""

    init: Init = "network"
    """Initial weights: the network's own, or Glorot's for all linear and convolutional layers."""

    precision: Precision = "fp32"
    """Arithmetic: fp32, bf16 autocast, or fp64."""

    seed: int = 0
    """Seed of the initial weights, the order of the samples and every other draw."""

    def __post_init__(self) -> None:
        check_types(self)
        find_model(self.model)
        find_dataset(self.data)
        check_image_size(self.data, self.image_size)
        check_holdout(self.holdout)
        self._check_reference()
        for name in ("batch", "base_batch", "ghost", "grow"):
            size = getattr(self, name)
            if size is not None and size < 2:
                raise InputError(name, f"{size} is below 2", "use 2 or more samples")
        if self.seed < 0:
            raise InputError("seed", f"{self.seed} is below 0", "use 0 or more")
        if self.ghost is not None and self.ghost > self.batch:
            problem = f"{self.ghost} is above batch {self.batch}"
            raise InputError("ghost", problem, "use batch or less")
        if self.noise and self.batch < self.base_batch:
            problem = f"batch {self.batch} is below base_batch {self.base_batch}"
            raise InputError("noise", problem, "turn it off")
        if self.clip is not None and not (isfinite(self.clip) and self.clip > 0):
            raise InputError("clip", f"{self.clip} is not above 0", "use None to turn it off")
        if self.ema is not None:
            check_decay("ema", self.ema)
        self._check_probabilities()
        check_spec(self.optimizer, self.regime)
        self.optimizer.scaled(self.batch, self.base_batch, self.lr_rule)  # refuses what it cannot
        self._check_rates()
        if self.grow is not None:
            self._check_growth()

    def _check_growth(self) -> None:
        fits: dict[str, tuple[Any, Any]] = {
            "hold": (self.hold, "epochs"),
            "noise": (self.noise, False),
            "ema": (self.ema, None),
            "optimizer": (self.optimizer.kind, "sgd"),
        }
        for name, (value, needed) in fits.items():
            if value != needed:
                problem = f"a batch cannot grow with {name} {value}"
                raise InputError("grow", problem, f"set {name} to {needed}")
        if max(self.grown[1]) < 2:
            problem = f"up to {self.grow}, batch {self.batch} grows at no drop of this regime"
            remedy = f"use {2 * self.batch} or more, and drops to half of regime.lr or less"
            raise InputError("grow", problem, remedy)
        if exact(self.regime.warmup) > exact(self.regime.drops[0][0]):
            raise InputError("grow", "the warm-up ends after the first drop", "shorten the warm-up")

    def _check_probabilities(self) -> None:
        for name in ("label_noise", "label_smoothing", "dropconnect"):
            value = getattr(self, name)
            if not 0 <= value < 1:
                problem = f"{value!r} is not a probability below 1"
                raise InputError(name, problem, "use 0 to turn it off")

    def _check_rates(self) -> None:
        """Refuse rates, scaled as the run will, beyond the weights' dtype: an optimizer would."""
        largest = torch.finfo(torch.float64 if self.precision == "fp64" else torch.float32).max
        factor = lr_scale(self.batch, self.base_batch, self.lr_rule)
        rates = [("lr", factor * self.regime.lr), ("weight_decay", self.regime.weight_decay)]
        for _, lr, *decays in self.regime.drops:
            rates += [("drops", rate) for rate in (factor * lr, *decays)]
        for name, rate in rates:
            if rate > largest:
                problem = f"a rate of {rate:g}, after lr_rule, is too large for {self.precision}"
                raise InputError(f"regime.{name}", problem, "use a smaller one")

    def _check_reference(self) -> None:
        if self.hold != "distance":
            if self.reference is not None:
                raise InputError(
                    "reference", f"hold {self.hold} does not use one", "set hold to distance"
                )
        elif not self.reference:
            raise InputError(
                "reference", "hold distance needs one", "name the folder of a small-batch run"
            )
        elif not self.regime.drops:
            raise InputError("hold", "distance needs a regime with drops", "use updates")

    def large(
        self,
        batch: int = 4096,
        lr_rule: Rule = "sqrt",
        ghost: int | None = 128,
        hold: Hold = "updates",
        reference: str | None = None,
    ) -> "Recipe":
        """Return the recipe adapted to a large batch, with the paper's three remedies."""
        changes = {"lr_rule": lr_rule, "ghost": ghost, "hold": hold, "reference": reference}
        return replace(self, batch=batch, **changes)  # type: ignore[arg-type]

    @property
    def data_options(self) -> dict[str, Any]:
        """The fields that `data.load` takes, besides the name."""
        names = ("image_size", "holdout", "normalisation")
        return {name: getattr(self, name) for name in names}

    @property
    def grown(self) -> tuple[Regime, tuple[int, ...]]:
        """The regime with the rates of a batch that grows, and each phase's batches per update."""
        if self.grow is None:
            return self.regime, (1,) * (len(self.regime.drops) + 1)
        return grow_batch(self.regime, self.batch, self.grow)

    def plan(self, samples: int) -> Plan:
        """Return the exact rates and updates of this recipe on a training set of ``samples``."""
        for name in ("batch", "grow"):
            if (size := getattr(self, name) or 0) > samples:
                problem = f"{size} is above the {samples} training samples of {self.data}"
                raise InputError(name, problem, f"use {samples} or less")
        held: int | Fraction = self.batch if self.hold == "epochs" else self.base_batch
        if self.hold == "rate":
            held = rate_batch(self.batch, self.base_batch, self.lr_rule)
        regime = self.grown[0].scaled(lr_scale(self.batch, self.base_batch, self.lr_rule))
        plan = Plan(recipe=self, samples=samples, regime=regime, held_batch=held)
        if plan.updates < 1:
            raise InputError(
                "regime.epochs", f"{regime.epochs} are less than one update", "use more epochs"
            )
        return plan

    def as_dict(self) -> dict[str, Any]:
        """Return the recipe as plain data for JSON; `from_dict` reads it back."""
        parts = {"regime": regime_to_dict(self.regime), "optimizer": spec_to_dict(self.optimizer)}
        return {**asdict(self), **parts}

    @classmethod
    def from_dict(cls, written: dict[str, Any]) -> "Recipe":
        """Read what `as_dict` wrote; a missing field has its default, an unknown one is refused."""
        try:
            parts: dict[str, Any] = {"regime": regime_from_dict(written["regime"])}
            if "optimizer" in written:
                parts["optimizer"] = spec_from_dict(written["optimizer"])
            return cls(**{**written, **parts})
        except (AttributeError, KeyError, TypeError) as error:
            problem = f"was not written by this version of ghostbatch ({error})"
            raise InputError("recipe", problem, "use the version that wrote it") from error

    def differences(self, written: dict[str, Any]) -> list[str]:
        """Return the names of the fields in which a recipe from `as_dict` differs from this one.

        A field that ``written`` lacks counts as its default, so old run folders stay valid.
        """
        theirs = Recipe.from_dict(written)
        names = (each.name for each in fields(self))
        return [name for name in names if getattr(theirs, name) != getattr(self, name)]
