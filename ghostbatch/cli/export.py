"""``ghostbatch export``: a run's network as a file for other programs."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from ghostbatch.cli.flags import parse
from ghostbatch.train.export import check_target, export_run
from ghostbatch.train.load import read_run


@dataclass(frozen=True)
class ExportOptions:
    """Write a run's network, with plain norms, as a file for other programs."""

    run: tyro.conf.Positional[Path]
    """The folder of the run."""
    to: Path
    """The file: NAME.pt is a state_dict, NAME.pt2 is torch.export's, NAME.onnx is ONNX."""


def command(argv: Sequence[str]) -> None:
    """Write the network of a run's newest checkpoint."""
    options = parse(ExportOptions, argv, "export")
    check_target(options.to)
    run = read_run(options.run)
    export_run(run, options.to)
    print(f"{options.to}: {run.recipe.model} after update {run.update:,} of {run.plan.updates:,}")
