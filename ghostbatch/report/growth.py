"""How the weight distance of a row's columns grows: fits of all columns on one window of updates.

A slope depends on the updates that it is fitted to, so all columns of a row are compared on the
same ones: the log-spaced updates up to the first drop of the learning rate in any column. Errors
are standard deviations over seeds, which need no model of the correlations along a run.
"""

from dataclasses import dataclass

import numpy as np

from ghostbatch.diagnostics import DiffusionFit, fit_diffusion
from ghostbatch.diagnostics.diffusion import slope_and_exponent
from ghostbatch.report.runs import Group
from ghostbatch.report.table import show_spread

FEWEST = 8
"""Points that a fit needs."""


@dataclass(frozen=True)
class Growth:
    """Fits of one column's weight distance d: a + b ln t, and a + b (ln t)^p."""

    column: str
    window: tuple[int, int]
    """First and last update of the fits."""
    slopes: tuple[float, ...]
    """b of each seed."""
    exponents: tuple[float, ...]
    """p of each seed."""
    mean: DiffusionFit
    """The fit of the mean over seeds, without intervals."""

    @property
    def slope(self) -> str:
        """The slope b: mean and standard deviation over seeds."""
        return _over_seeds(self.slopes)

    @property
    def exponent(self) -> str:
        """The exponent p: mean and standard deviation over seeds."""
        return _over_seeds(self.exponents)


def fit_growth(groups: list[Group]) -> list[Growth]:
    """Fit the finished runs of each column; return nothing if the common window is too short."""
    end = min((first_phase_end(group) for group in groups), default=0)
    fits = []
    for group in groups:
        seeds = [
            {r.update: r.distance for r in run.records.log_spaced if r.update <= end}
            for run in group.finished
        ]
        t = sorted(set.intersection(*map(set, seeds)))
        if len(t) < FEWEST:
            return []
        distances = [[seed[update] for update in t] for seed in seeds]
        slopes, exponents = zip(*(slope_and_exponent(t, d) for d in distances), strict=True)
        mean = fit_diffusion(t, np.mean(distances, 0).tolist(), resamples=0)
        fits.append(Growth(group.column, (t[0], t[-1]), slopes, exponents, mean))
    return fits


def first_phase_end(group: Group) -> int:
    """Return the update of the first drop; with hold "distance", the earliest of the seeds."""
    plan = group.runs[0].plan
    if plan.recipe.hold != "distance":
        return (*plan.drop_updates, plan.updates)[0]
    return min(
        max((r.update for r in run.records.shown if r.lr >= plan.regime.lr), default=0)
        for run in group.finished
    )


def _over_seeds(values: tuple[float, ...]) -> str:
    """Return mean and standard deviation; one seed has no error.

    >>> _over_seeds((1.0, 2.0, 3.0)), _over_seeds((2.0,))
    ('2.00 ± 1.00', '2.00 (one seed)')
    """
    return show_spread(values, 2) + (" (one seed)" if len(values) == 1 else "")
