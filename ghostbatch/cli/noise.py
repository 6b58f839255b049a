"""The flags of a measured gradient noise scale, by which commands say whether a batch pays."""

from dataclasses import dataclass

from ghostbatch.errors import InputError
from ghostbatch.study.advice import MeasuredNoise


@dataclass(frozen=True, kw_only=True)
class NoiseOptions:
    """The gradient noise scale of your training, if you have measured it."""

    noise_scale: float | None = None
    """The gradient noise scale, as gb.GradientNoiseScale measures it, to say if the batch pays."""
    interval: str | None = None
    """The interval of the noise scale, for example 800,1300."""

    @property
    def measured(self) -> MeasuredNoise | None:
        """The noise scale with its interval, if they are given."""
        if self.noise_scale is None:
            if self.interval is not None:
                raise InputError("interval", "there is no noise scale", "give noise_scale, too")
            return None
        if self.interval is None:
            return MeasuredNoise(self.noise_scale)
        try:
            low, high = map(float, self.interval.split(","))
        except ValueError:
            problem = f"{self.interval!r} is not an interval"
            raise InputError("interval", problem, "give LOW,HIGH, for example 800,1300") from None
        return MeasuredNoise(self.noise_scale, (low, high))
