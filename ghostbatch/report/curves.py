"""The values behind the curves of a row: means and bands over seeds, and single unfinished runs."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ghostbatch.report.charts import rounded
from ghostbatch.report.drawing import Data
from ghostbatch.report.runs import Group, Run
from ghostbatch.train import Record

FIELDS = ("column", "split", "run", "update", "epoch", "share", "marker")
MARKERS = 8
"""Marked points of a curve, at equal steps of log time."""

EVENLY = 12
"""The same at equal steps of time."""

VALUES = ("error", "distance")


@dataclass(frozen=True)
class Curve:
    """Records of one or several seeds at the updates after 0 that all of them have."""

    label: str
    records: list[list[Record]]
    """For each seed, one record per update."""

    def values(self, name: str) -> np.ndarray:
        """Return "error" in percent or "distance", with shape (seeds, updates)."""
        if name == "error":
            return np.array([[100 - record.accuracy for record in seed] for seed in self.records])
        return np.array([[record.distance for record in seed] for seed in self.records])


def curves_of(groups: list[Group]) -> Data:
    """Return the curves of a row's columns, one line for each column, split, run and update.

    Finished seeds make one curve with a band of one standard deviation; each run that has not
    finished, or has diverged, is a curve of its own.
    """
    bands = [f"{name}_{end}" for name in VALUES for end in ("low", "high")]
    data: Data = {name: [] for name in (*FIELDS, *VALUES, *bands)}
    for place, group in enumerate(groups):
        updates = max(run.plan.updates for run in group.runs)
        for split in ("train", "validation"):
            for curve in _curves(group, split):
                first = curve.records[0]
                times = [record.update for record in first]
                texts = {"column": group.column, "split": split, "run": curve.label}
                for name, text in texts.items():
                    data[name] += [text] * len(first)
                data["update"] += times
                data["epoch"] += rounded(record.epoch for record in first)
                data["marker"] += _marked(times, updates, place / len(groups))
                data["share"] += rounded(100 * update / updates for update in times)
                for name in VALUES:
                    _add_values(data, name, curve.values(name))
    return data


def add_lines(data: Data, split: str, lines: dict[str, tuple[list[float], list[float]]]) -> None:
    """Add updates and distances by column, such as those of a fit, in place of a split."""
    for column, (updates, distances) in lines.items():
        given: Data = {"column": [column] * len(updates), "split": [split] * len(updates)}
        given |= {"update": updates, "distance": distances}
        for name in data:
            data[name] += given.get(name, [None] * len(updates))


def _marked(times: list[int], updates: int, shift: float) -> list[int]:
    """Return which points of a curve to mark, ``shift`` steps late.

    1 is at equal steps of log time, 2 at equal steps of time, and 3 at both. Columns have other
    shifts, so that markers of curves that coincide lie side by side.
    """
    if not times:
        return []
    log_steps = MARKERS * np.log(times) / max(np.log(times[-1]), 1e-9)
    steps = np.floor([log_steps - shift, EVENLY * np.array(times) / updates - shift])
    changed = np.diff(steps, prepend=steps[:, :1]) > 0
    return (changed[0] + 2 * changed[1]).tolist()  # type: ignore[no-any-return]


def _add_values(data: Data, name: str, values: np.ndarray) -> None:
    """Add means, and the ends of the bands; None where there is no number or a single seed."""
    middle, low, high = values.mean(0), None, None
    if len(values) > 1:
        deviation = values.std(0, ddof=1)
        low, high = middle - deviation, middle + deviation
    for key, column in ((name, middle), (f"{name}_low", low), (f"{name}_high", high)):
        if column is None:
            data[key] += [None] * len(middle)
        else:
            data[key] += [v if np.isfinite(v) else None for v in rounded(column)]


def _curves(group: Group, split: str) -> Iterator[Curve]:
    seeds = {run.seed: _by_update(run, split) for run in group.runs}
    done = [seeds[run.seed] for run in group.finished]
    if done:
        shared = sorted(set.intersection(*map(set, done)))
        label = f"mean of {len(done)} seeds" if len(done) > 1 else f"seed {group.finished[0].seed}"
        yield Curve(label, [[seed[update] for update in shared] for seed in done])
    for run in group.runs:
        if run.status != "finished" and seeds[run.seed]:
            yield Curve(f"seed {run.seed}, {run.status}", [list(seeds[run.seed].values())])


def _by_update(run: Run, split: str) -> dict[int, Record]:
    return {r.update: r for r in run.records.shown if r.split == split and r.update > 0}
