"""``ghostbatch train``: one run."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from ghostbatch.cli import is_first_rank
from ghostbatch.cli.flags import cores, name_first, parse
from ghostbatch.data import OnBadImage, find_info
from ghostbatch.recipe import Recipe
from ghostbatch.report.table import show_rates
from ghostbatch.report.tensorboard import TensorBoard
from ghostbatch.study import find_recipe
from ghostbatch.train import Record, data_bytes, estimate, find_device, train
from ghostbatch.train.ranks import TIMEOUT
from ghostbatch.train.reference import read_drop_targets


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The arguments of `train` other than the recipe."""

    out: Path
    """The run's folder; an interrupted run continues from what it holds."""
    device: str | None = None
    """cpu, cuda, ...; None is the GPU if there is one."""
    threads: int | None = None
    """CPU threads; None is PyTorch's choice."""
    evaluations: int = 20
    """How many times the test set is evaluated, evenly over the updates."""
    checkpoint_seconds: float = 30.0
    """Time between checkpoints."""
    checkpoint_updates: int | None = None
    """Largest number of updates between checkpoints; None is no limit."""
    micro: int | None = None
    """Samples per backward pass, over all ranks: less memory for the same numbers."""
    data_dir: Path | None = None
    """Folder of the data sets; None is GHOSTBATCH_DATA, or the folder data here."""
    download: bool = False
    """Download the data set if it is not there."""
    workers: int = field(default_factory=cores)
    """Processes that decode the images of a folder."""
    on_bad_image: OnBadImage = "fatal"
    """What to do with an image that cannot be read: stop, or warn and use another one."""
    timeout: float = TIMEOUT
    """Seconds that ranks wait for each other before the run ends."""


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """Run one recipe; every field of the recipe is a flag."""

    recipe: Annotated[Recipe, tyro.conf.arg(name="")]
    run: Annotated[RunOptions, tyro.conf.arg(name="")]
    dry_run: bool = False
    """Print the recipe, its updates, and estimates of memory and time; run nothing."""
    tensorboard: bool = False
    """Also write the records for TensorBoard, into the run's folder."""


def command(argv: Sequence[str]) -> None:
    """Run one recipe and print its progress."""
    name, rest = name_first(argv, "recipe", "train")
    default = TrainOptions(recipe=find_recipe(name), run=RunOptions(out=Path("runs") / name))
    options = parse(TrainOptions, rest, f"train {name}", default)
    out = options.run.out
    console = Console(quiet=not is_first_rank())
    if options.dry_run:
        _print_estimates(options.recipe, options.run, console)
        return
    board = TensorBoard(out) if options.tensorboard else None

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

    summary = train(options.recipe, **vars(options.run), on_record=show)
    reason = f" ({summary.reason})" if summary.reason else ""
    took = timedelta(seconds=round(summary.seconds))
    console.print(
        f"{summary.status}{reason}: accuracy {summary.accuracy:.2f} % after {summary.updates:,} "
        f"updates ({summary.epochs:.4g} epochs) in {took}; {out}",
        highlight=False,
        soft_wrap=True,
    )


def _print_estimates(recipe: Recipe, run: RunOptions, console: Console) -> None:
    """Print the recipe, its updates, and the memory and time that it would need here."""
    info = find_info(recipe.data)
    plan = recipe.plan(info.samples)
    if recipe.hold == "distance":
        read_drop_targets(plan)  # refuses what the run would refuse
    data = "the images are decoded during the run"
    if not (recipe.data.startswith("folder:") or recipe.data == "imagenet"):
        data = f"{data_bytes(info) / 2**20:,.0f} MiB for the data"
    device = find_device(run.device)
    needs = estimate(plan, info, device, run.micro)
    lines = {
        **{field: str(value) for field, value in recipe.as_dict().items() if field != "regime"},
        "rates (update)": show_rates(plan),
        "weight decay": f"{plan.regime.weight_decay:g}",
        "updates": f"{plan.updates:,}",
        "epochs": f"{plan.epoch(plan.updates):.4g}",
        "parameters": f"{needs.parameters:,}",
        "memory": f"about {needs.bytes / 2**20:,.0f} MiB of {device} for weights and activations, "
        f"{data}",
        "time": f"about {timedelta(seconds=round(needs.seconds))} for forward and backward on this "
        f"{device}",
    }
    width = max(map(len, lines))
    for name, line in lines.items():
        console.print(f"{name:<{width}}  {line}", highlight=False, soft_wrap=True, markup=False)
