"""A training regime: how the learning rate and weight decay change over the epochs.

Times are in epochs. `update_at` converts an epoch to an update in rational arithmetic, so that the
result never depends on how a float rounds.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from fractions import Fraction
from functools import lru_cache, partial
from math import cos, floor, inf, isfinite, pi
from numbers import Rational
from typing import Any, Literal, NamedTuple

from ghostbatch.errors import InputError, check_types

Epochs = int | float | Fraction
"""A time or a length."""
Drop = tuple[Epochs, float] | tuple[Epochs, float, float]
"""An epoch and the rate from there on, and the weight decay if it changes, too."""
DROP_FORMS = "give (epoch, lr) or (epoch, lr, weight decay)"
Schedule = Literal["drops", "cosine", "polynomial"]
"""How the rate falls: at the drops, or with every update."""

# Made from text to be objects of their own: `is` tells a default from the same number given by the
# user, also after `dataclasses.replace`. RegimeScheduler changes and compares only what was given.
DEFAULT_MOMENTUM = float("0.9")
DEFAULT_WEIGHT_DECAY = float("1e-4")


class Rates(NamedTuple):
    """Learning rate and weight decay of one update."""

    lr: float
    weight_decay: float


@dataclass(frozen=True)
class Regime:
    """Learning rate and weight decay as functions of the epoch.

    >>> regime = Regime(lr=0.1, epochs=200, drops=((81, 0.01), (122, 1e-3), (164, 1e-4)))
    >>> regime.at(80.5).lr, regime.at(81).lr
    (0.1, 0.01)
    >>> regime.scaled(2).at(0).lr, regime.stretched(2).drops[0]
    (0.2, (162, 0.01))
    >>> cosine = Regime(lr=0.1, epochs=200, warmup=10, schedule="cosine")
    >>> [round(cosine.at(epoch).lr, 4) for epoch in (0, 5, 10, 105, 200)]
    [0.0, 0.05, 0.1, 0.05, 0.0]
    """

    lr: float
    """Learning rate at the start."""

    epochs: Epochs
    """Length of the run; may be a fraction."""

    drops: tuple[Drop, ...] = ()
    """Pairs (epoch, lr) or triples (epoch, lr, weight decay), in order of time."""

    momentum: float = DEFAULT_MOMENTUM
    """Momentum of SGD and LARS, constant."""

    weight_decay: float = DEFAULT_WEIGHT_DECAY
    """Weight decay at the start."""

    warmup: Epochs = 0
    """Epochs over which the rate rises linearly from 0; 0 is none."""

    schedule: Schedule = "drops"
    """How the rate falls: at the drops, or from the end of the warm-up to 0 at the end of the run,
    as lr (1 + cos(pi x)) / 2 or as lr (1 - x) ** power, x being the part done."""

    power: float = 1.0
    """Exponent of the schedule "polynomial"; 1 is a straight line."""

    def __post_init__(self) -> None:
        check_types(self, "regime.")
        for field in ("lr", "weight_decay"):
            check_rate(f"regime.{field}", getattr(self, field))
        within = f"within the {self.epochs} epochs"
        for field, fits, needed, remedy in (
            ("momentum", 0 <= self.momentum < 1, "in [0, 1)", "use 0.9, for example"),
            ("epochs", 0 < self.epochs < inf, "above 0", "use 1 or more"),
            ("warmup", 0 <= self.warmup <= self.epochs, within, "use 0 for none"),
            ("power", 0 < self.power < inf, "above 0", "use 1, for example"),
        ):
            if not fits:
                problem = f"{getattr(self, field)} is not {needed}"
                raise InputError(f"regime.{field}", problem, remedy)
        if not isinstance(self.drops, Sequence) or isinstance(self.drops, str):
            problem = f"this {type(self.drops).__name__} is not a sequence of drops"
            raise InputError("regime.drops", problem, DROP_FORMS)
        self._check_schedule()
        self._check_drops()
        drops = tuple((epoch, *map(float, rates)) for epoch, *rates in self.drops)
        object.__setattr__(self, "drops", drops)

    def _check_schedule(self) -> None:
        if self.drops and self.schedule != "drops":
            problem = f"schedule {self.schedule} has none"
            remedy = "leave them out (in a shell: --regime.drops ,)"
            raise InputError("regime.drops", problem, remedy)
        if self.power != 1 and self.schedule != "polynomial":
            problem = f"schedule {self.schedule} does not use it"
            raise InputError("regime.power", problem, "set regime.schedule to polynomial")

    def _check_drops(self) -> None:
        before: Epochs = 0
        for drop in self.drops:
            if not isinstance(drop, Sequence) or len(drop) not in (2, 3):
                raise InputError("regime.drops", f"{drop!r} is not a drop", DROP_FORMS)
            epoch, *rates = drop
            for rate in (epoch, *rates):
                check_rate("regime.drops", rate)
            if not exact(before) < exact(epoch):
                problem = f"epoch {epoch} does not come after {before}"
                raise InputError("regime.drops", problem, "sort by epoch")
            if not exact(epoch) < exact(self.epochs):
                problem = f"epoch {epoch} is not before the end at {self.epochs}"
                raise InputError("regime.drops", problem, "remove it or raise regime.epochs")
            if not self.weight_decay and len(drop) == 3 and drop[2]:
                problem = f"weight decay {drop[2]} after 0 would have no effect: groups at 0 stay"
                raise InputError("regime.drops", problem, "begin with one above 0")
            before = epoch

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle what differs from the defaults, so that another process still tells them apart."""
        values = ((each, getattr(self, each.name)) for each in fields(self))
        given = {each.name: value for each, value in values if value is not each.default}
        return partial(type(self), **given), ()

    def scaled(self, factor: float) -> "Regime":
        """Return the regime with every learning rate times ``factor``; weight decay stays."""
        check_rate("factor", factor)
        drops = tuple((d[0], d[1] * factor, *d[2:]) for d in self.drops)
        return replace(self, lr=self.lr * factor, drops=drops)

    def stretched(self, factor: Epochs) -> "Regime":
        """Return the regime with every time (drops, warm-up and length) times ``factor``."""
        check_above_zero("factor", factor)

        def stretch(time: Epochs) -> Epochs:
            return _simplest(exact(time) * exact(factor))

        drops = tuple((stretch(d[0]), *d[1:]) for d in self.drops)
        return replace(self, epochs=stretch(self.epochs), drops=drops, warmup=stretch(self.warmup))

    def at(self, epoch: Epochs) -> Rates:
        """Return the rates at ``epoch``; a drop takes effect at its own epoch."""
        check_rate("epoch", epoch)
        now, warmup = exact(epoch), exact(self.warmup)
        rates = self.phase(sum(1 for drop in self.drops if exact(drop[0]) <= now))
        if now < warmup:
            return rates._replace(lr=rates.lr * float(now / warmup))
        return rates._replace(lr=rates.lr * self._decay(now - warmup, exact(self.epochs) - warmup))

    def at_update(self, update: int, samples: int, batch: int | Fraction) -> Rates:
        """Return the rates of the 0-based ``update``, with drops at the updates of `update_at`."""
        drops = sum(1 for drop in self.drops if update_at(drop[0], samples, batch) <= update)
        return self.in_phase(drops, update, samples, batch)

    def in_phase(self, drops: int, update: int, samples: int, batch: int | Fraction) -> Rates:
        """Return the rates of the 0-based ``update`` after ``drops`` drops, whenever those were."""
        rates = self.phase(drops)
        start = update_at(self.warmup, samples, batch)
        if update < start:
            done = Fraction(update * batch, samples) / exact(self.warmup)
            return rates._replace(lr=rates.lr * min(1.0, float(done)))
        length = update_at(self.epochs, samples, batch) - start
        return rates._replace(lr=rates.lr * self._decay(update - start, length))

    def phase(self, drops: int) -> Rates:
        """Return the rates after ``drops`` drops, without warm-up.

        A drop that gives no weight decay keeps the one before.
        """
        rates = Rates(self.lr, self.weight_decay)
        for _, *new in self.drops[:drops]:
            rates = Rates(new[0], new[1] if len(new) > 1 else rates.weight_decay)
        return rates

    def _decay(self, done: int | Fraction, length: int | Fraction) -> float:
        """Return the schedule's factor on the rate, ``done`` of a ``length`` after the warm-up."""
        if self.schedule == "drops":
            return 1.0
        left = float((length - done) / length) if done < length else 0.0
        return (1 - cos(pi * left)) / 2 if self.schedule == "cosine" else left**self.power


def regime_to_dict(regime: Regime) -> dict[str, Any]:
    """Return the regime as plain data for JSON; a fraction becomes text such as 50/3."""

    def plain(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return [plain(each) for each in value]
        if isinstance(value, Rational):  # also a whole number of NumPy
            return int(value.numerator) if value.denominator == 1 else str(value)
        return value

    return {name: plain(value) for name, value in asdict(regime).items()}


def regime_from_dict(written: dict[str, Any]) -> Regime:
    """Read what `regime_to_dict` wrote; a missing field has its default."""

    def time(value: Epochs | str) -> Epochs:
        return Fraction(value) if isinstance(value, str) else value

    times = {name: time(written[name]) for name in ("epochs", "warmup")}
    drops = tuple((time(epoch), *rates) for epoch, *rates in written["drops"])
    return Regime(**{**written, **times, "drops": drops})


def update_at(epoch: Epochs, samples: int, batch: int | Fraction) -> int:
    """Return the 0-based update at which ``epoch`` begins: round(e N / B), half up, exactly.

    >>> update_at(81, samples=50_000, batch=128), update_at(0.7, samples=10, batch=2)
    (31641, 4)
    """
    return floor(exact(epoch) * samples / batch + Fraction(1, 2))


@lru_cache(typed=True)  # 0.1 equals a fraction that is not 1/10
def exact(number: Epochs) -> Fraction:
    """Return the number as it is written: 0.7 is 7/10, not the nearest binary fraction."""
    return Fraction(str(number)) if isinstance(number, float) else Fraction(number)


def _simplest(number: Fraction) -> Epochs:
    """Return the number as an int or a float if that is exact, else as it is."""
    if number.denominator == 1:
        return number.numerator
    return float(number) if exact(float(number)) == number else number


def check_rate(field: str, rate: Epochs) -> None:
    """Refuse a rate, or a time, that is not a finite number of 0 or more."""
    if not (_is_finite(rate) and rate >= 0):
        raise InputError(field, f"{rate!r} is out of range", "use a finite number, 0 or more")


def check_above_zero(field: str, number: Epochs) -> None:
    """Refuse what is not a finite number above 0."""
    if not (_is_finite(number) and number > 0):
        raise InputError(field, f"{number!r} is out of range", "use a finite number above 0")


def _is_finite(number: object) -> bool:
    try:
        return isinstance(number, float | Rational) and isfinite(number)
    except OverflowError:  # a whole number beyond all floats
        return False
