"""Writes run folders with curves that look like training's, without training."""

import json
from itertools import pairwise
from math import exp, log
from zlib import crc32

import numpy as np

from ghostbatch.files import add_crc, to_checked_json
from ghostbatch.study.manifest import held_part, write_study
from ghostbatch.train.loop import schedule

HEADER = {
    "versions": {"ghostbatch": "0.1.0", "torch": "2.13.0", "python": "3.12.3"},
    "device": "cpu (x86_64)",
    "backend": "tensor",
    "threads": 1,
    "commit": "0123456789abcdef",
}
START, FLOOR = 90.0, 4.0
"""Error in percent at the beginning, and that of an endless training."""


def write_study_folder(study, out, evaluations=20, unlike=None, missing=()):
    """Write the folder of a study whose cells have finished.

    ``unlike`` says by (row, column, seed) which run has "diverged" or is "not finished"; those of
    ``missing`` have no folder.
    """
    cells = study.cells(out=out)
    for cell in cells:
        key = (cell.row, cell.column, cell.recipe.seed)
        if key not in missing:
            write_run(cell.folder(out), cell.plan, (unlike or {}).get(key, "finished"), evaluations)
    write_study(held_part(study, cells, None), out)


def write_run(folder, plan, status="finished", evaluations=20):
    """Write the files of a run; one that has not finished stops at a third of its updates."""
    folder.mkdir(parents=True)
    header = {"recipe": plan.recipe.as_dict(), "samples": plan.samples, **HEADER}
    (folder / "run.json").write_bytes(to_checked_json(header, indent=2))
    ends = {"finished": plan.updates, "diverged": plan.updates // 8}
    records = list(_records(plan, ends.get(status, plan.updates // 3), evaluations))
    lines = (add_crc(json.dumps(record)) + "\n" for record in records)
    (folder / "metrics.jsonl").write_text("".join(lines))
    if status not in ends:
        return
    last = records[-1]
    fields = {"status": status, "updates": last["update"], "epochs": last["epoch"]}
    fields |= {name: last[name] for name in ("accuracy", "loss", "distance")}
    fields |= {"seconds": round(plan.updates * plan.recipe.batch / 2e4, 1), "reason": None}
    if status == "diverged":
        fields |= {"loss": None, "reason": "the loss was not finite; use a smaller rate"}
    else:
        fields["recalibrated_accuracy"] = round(last["accuracy"] + 0.1, 2)
    (folder / "summary.json").write_bytes(to_checked_json(fields))


def add_measured(metrics):
    """Give each validation record a sharpness of 8, and a noise scale with an interval.

    From update 5 on the interval has no upper end.
    """
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    for fields in lines:
        fields.pop("crc", None)
        if fields["split"] == "validation":
            update = fields["update"]
            fields |= {"noise_scale": 100.0 + update, "noise_scale_low": 50.0}
            fields |= {"noise_scale_high": 200.0 + update if update < 5 else None, "sharpness": 8.0}
    metrics.write_text("".join(add_crc(json.dumps(fields)) + "\n" for fields in lines))


def _records(plan, end, evaluations):
    """Yield the fields of records: the error falls with updates, and falls again at each drop."""
    draw = np.random.default_rng(crc32(f"{plan.recipe}".encode()))
    starts = [0, *plan.drop_updates, plan.updates]
    worse = exp(draw.normal(0, 0.04)) * (1 + 0.4 * max(0.0, log(3e4 / plan.updates)) / log(10))
    logged, evaluated = schedule(plan, evaluations)
    error, slope = START, 0.9 * plan.rates(0).lr ** 0.5 * exp(draw.normal(0, 0.02))
    distance = 0.0
    for phase, (start, stop) in enumerate(pairwise(starts)):
        floor = FLOOR * worse * (1 + 2.2 * 0.3**phase)
        reached, moved, pace = error, distance, 0.25**phase
        for update in sorted(t for t in logged if start < t <= min(stop, end)):
            since = update - start
            error = floor + (reached - floor) / (1 + since * pace / (40 if phase else 12)) ** 0.8
            distance = moved + pace * slope * log(1 + since)
            for split in ("train", "validation") if update in evaluated else ("train",):
                seen = error * exp(draw.normal(0, 0.03 / 2**phase))
                fitted = max(0.02, seen - 0.8 * FLOOR * min(1.0, update * 3 / plan.updates))
                shown = fitted if split == "train" else seen
                yield {
                    **{"update": update, "epoch": plan.epoch(update), "split": split},
                    **{"loss": shown / 30, "accuracy": 100 - shown, "lr": plan.rates(start).lr},
                    **{"distance": distance * exp(draw.normal(0, 0.003))},
                    **{"gradient_norm": 1.0, "clipped": 0.1},
                }
