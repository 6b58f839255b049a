"""``ghostbatch train``: one run."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from ghostbatch.cli.flags import name_first, parse
from ghostbatch.recipe import Recipe
from ghostbatch.report.tensorboard import TensorBoard
from ghostbatch.report.terminal import clock
from ghostbatch.study import find_recipe
from ghostbatch.train import Record, is_first, train


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """One run; every field of the recipe is a flag."""

    recipe: Annotated[Recipe, tyro.conf.arg(name="")]
    out: Path
    """The run's folder; a run that was interrupted goes on from what it holds."""
    device: str | None = None
    """cpu, cuda, ...; None is the GPU if there is one."""
    threads: int | None = None
    """Threads for the CPU's arithmetic; None is PyTorch's choice."""
    evaluations: int = 20
    """How often the test set is looked at."""
    checkpoint_seconds: float = 30.0
    """Time between checkpoints."""
    checkpoint_updates: int | None = None
    """At most so many updates between checkpoints, besides."""
    micro: int | None = None
    """Samples per backward pass, over all ranks: less memory for the same numbers."""
    tensorboard: bool = False
    """Write the records for TensorBoard too, into the run's folder."""


def train_command(argv: Sequence[str]) -> None:
    """Run one recipe and print how it goes."""
    name, rest = name_first(argv, "recipe", "train")
    default = TrainOptions(recipe=find_recipe(name), out=Path("runs") / name)
    options = parse(TrainOptions, rest, f"train {name}", default)
    console = Console(quiet=not is_first())
    board = TensorBoard(options.out) if options.tensorboard else None

    def show(record: Record) -> None:
        if board is not None:
            board(record)
        if record.split == "validation":
            console.print(
                f"update {record.update:>6,}  epoch {record.epoch:>6.4g}  lr {record.lr:.3g}  "
                f"loss {record.loss:.4f}  accuracy {record.accuracy:.2f} %  "
                f"distance {record.distance:.2f}",
                highlight=False,
                soft_wrap=True,
            )

    summary = train(
        options.recipe,
        out=options.out,
        device=options.device,
        micro=options.micro,
        threads=options.threads,
        evaluations=options.evaluations,
        checkpoint_seconds=options.checkpoint_seconds,
        checkpoint_updates=options.checkpoint_updates,
        on_record=show,
    )
    reason = f" ({summary.reason})" if summary.reason else ""
    console.print(
        f"{summary.status}{reason}: accuracy {summary.accuracy:.2f} % after {summary.updates:,} "
        f"updates ({summary.epochs:.4g} epochs) in {clock(summary.seconds)}; {options.out}",
        highlight=False,
        soft_wrap=True,
    )
