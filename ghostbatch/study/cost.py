"""What cells of a study cost: updates and images anywhere, and time on this machine."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from ghostbatch.data import find_info
from ghostbatch.study.declare import Cell
from ghostbatch.study.executor import Where
from ghostbatch.study.placement import find_devices
from ghostbatch.train import find_device, measure_pace


@dataclass(frozen=True)
class Cost:
    """What cells cost together."""

    cells: Sequence[Cell]
    seconds: dict[Cell, float] = field(default_factory=dict)
    """The time of each cell by itself, as far as it was measured."""
    places: int = 1
    """How many cells run side by side."""

    @property
    def updates(self) -> int:
        """Updates in all."""
        return sum(cell.plan.updates for cell in self.cells)

    @property
    def images(self) -> int:
        """Training images to compute in all."""
        return sum(cell.images for cell in self.cells)

    @property
    def seconds_in_all(self) -> float:
        """The time of all measured cells, side by side."""
        each = self.seconds.values()
        return max(sum(each) / self.places, max(each, default=0.0))


def measure_cost(cells: Sequence[Cell], where: Where, jobs: int) -> Cost:
    """Return what cells cost on this machine; time a few updates on its first device.

    The costliest cell of each network and data set is timed, and the others are in proportion.
    Cells that cannot be timed have no time. Cells that share a GPU count as if they ran one after
    the other.
    """
    devices = find_devices(where.device, torch.cuda.device_count())
    places = jobs if devices == ("cpu",) else min(jobs, len(devices))
    kinds = defaultdict(list)
    for cell in cells:
        r = cell.recipe
        kinds[r.model, r.data, r.image_size, r.precision].append(cell)
    seconds = {}
    for members in kinds.values():
        seconds.update(_time_kind(members, where, find_device(devices[0])))
    return Cost(cells, seconds, max(1, min(places, len(cells))))


def _time_kind(cells: Sequence[Cell], where: Where, device: torch.device) -> dict[Cell, float]:
    """Return the time of each cell of one network, measured on the costliest of them."""
    costliest = max(cells, key=lambda cell: cell.cost)
    recipe = costliest.recipe
    try:
        info = find_info(recipe.data, recipe.image_size, recipe.holdout)
        micro = where.micro_of(recipe)
        pace = measure_pace(costliest.plan, info, device, micro, where.threads)
    except Exception:  # the cell's own run will report it, and the others go on
        return {}
    per_cost = pace.update * costliest.plan.length / costliest.cost
    return {
        cell: replace(pace, update=per_cost * cell.cost / cell.plan.length).seconds(
            cell.plan, cell.evaluations
        )
        for cell in cells
    }
