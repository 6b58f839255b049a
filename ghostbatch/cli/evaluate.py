"""``ghostbatch evaluate``: loss and accuracy of a run's network on its test set."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from ghostbatch.cli.flags import parse
from ghostbatch.train import find_device, read_summary
from ghostbatch.train.load import Evaluation, evaluate_run, read_run


@dataclass(frozen=True)
class EvaluateOptions:
    """Print loss and accuracy of a run's network on its test set."""

    run: tyro.conf.Positional[Path]
    """The folder of the run."""
    recalibrate: bool = False
    """Also with running statistics averaged over the training set, in the run's ghosts."""
    averaged: bool = False
    """Also the averaged weights of a run with --ema, with running statistics that fit them."""
    device: str | None = None
    """cpu, cuda, ...; None is the GPU if there is one."""
    data_dir: Path | None = None
    """Folder of the data sets; None is GHOSTBATCH_DATA, or the folder data here."""


def command(argv: Sequence[str]) -> None:
    """Evaluate the network of a run's newest checkpoint; compare with the run's summary."""
    options = parse(EvaluateOptions, argv, "evaluate")
    device = find_device(options.device)
    run = read_run(options.run)
    summary = read_summary(options.run / "summary.json")
    found = evaluate_run(run, device, options.data_dir)
    held_out = " (held-out images)" if run.recipe.holdout else ""
    what = f"{run.recipe.model} on {run.recipe.data}{held_out}"
    print(f"{what} after update {run.update:,}: {_show(found)}")
    if summary is None:
        print(f"the run has not ended: {run.plan.updates:,} updates are planned")
    elif summary.updates != run.update:
        print(f"summary.json is about update {summary.updates:,}: the run {summary.status}")
    elif found.agrees_with(summary):
        print("summary.json agrees")
    else:
        print(f"summary.json differs: {_show(Evaluation(summary.loss, summary.accuracy))}")
    if options.recalibrate:
        again = evaluate_run(run, device, options.data_dir, recalibrated=True)
        print(f"with recalibrated statistics: {_show(again)}")
    if options.averaged:
        average = read_run(options.run, averaged=True)
        again = evaluate_run(average, device, options.data_dir, recalibrated=True)
        print(f"averaged weights, recalibrated statistics: {_show(again)}")


def _show(found: Evaluation) -> str:
    return f"loss {found.loss:.4f}, accuracy {found.accuracy:.2f} %"
