"""``ghostbatch train``: one run."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from ghostbatch.cli.flags import cores, name_first, parse
from ghostbatch.data import OnBadImage, find_info
from ghostbatch.recipe import Recipe
from ghostbatch.report.page import show_rates
from ghostbatch.report.tensorboard import TensorBoard
from ghostbatch.report.terminal import clock
from ghostbatch.study import find_recipe
from ghostbatch.train import Record, data_bytes, estimate, find_device, is_first, train
from ghostbatch.train.reference import read_drop_targets


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
    data_dir: Path | None = None
    """Where the data sets are; None is GHOSTBATCH_DATA, or the folder data here."""
    download: bool = False
    """Get the data set if it is not there."""
    workers: int = field(default_factory=cores)
    """Processes that decode the images of a folder."""
    on_bad_image: OnBadImage = "fatal"
    """What to do about an image that cannot be read: end, or say so and take another."""
    dry_run: bool = False
    """Print the recipe, its updates, and estimates of memory and time; run nothing."""
    tensorboard: bool = False
    """Write the records for TensorBoard too, into the run's folder."""


def train_command(argv: Sequence[str]) -> None:
    """Run one recipe and print how it goes."""
    name, rest = name_first(argv, "recipe", "train")
    default = TrainOptions(recipe=find_recipe(name), out=Path("runs") / name)
    options = parse(TrainOptions, rest, f"train {name}", default)
    console = Console(quiet=not is_first())
    if options.dry_run:
        _print_estimates(options, console)
        return
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
        data_dir=options.data_dir,
        download=options.download,
        workers=options.workers,
        on_bad_image=options.on_bad_image,
        on_record=show,
    )
    reason = f" ({summary.reason})" if summary.reason else ""
    console.print(
        f"{summary.status}{reason}: accuracy {summary.accuracy:.2f} % after {summary.updates:,} "
        f"updates ({summary.epochs:.4g} epochs) in {clock(summary.seconds)}; {options.out}",
        highlight=False,
        soft_wrap=True,
    )


def _print_estimates(options: TrainOptions, console: Console) -> None:
    """The recipe, what it comes to, and what it would take here."""
    recipe, info = options.recipe, find_info(options.recipe.data)
    plan = recipe.plan(info.samples)
    if recipe.hold == "distance":
        read_drop_targets(plan)  # refused now if the run would be
    data = "images are decoded as they go"
    if not (recipe.data.startswith("folder:") or recipe.data == "imagenet"):
        data = f"{data_bytes(info) / 2**20:,.0f} MiB for the data"
    device = find_device(options.device)
    needs = estimate(plan, info, device, options.micro)
    lines = {
        **{field: str(value) for field, value in recipe.as_dict().items() if field != "regime"},
        "rates (update)": show_rates(plan),
        "weight decay": f"{plan.regime.weight_decay:g}",
        "updates": f"{plan.updates:,}",
        "epochs": f"{plan.epoch(plan.updates):.4g}",
        "parameters": f"{needs.parameters:,}",
        "memory": f"about {needs.bytes / 2**20:,.0f} MiB of {device} for weights and activations, "
        f"{data}",
        "time": f"about {clock(needs.seconds)} for forward and backward on this {device}",
    }
    width = max(map(len, lines))
    for name, line in lines.items():
        console.print(f"{name:<{width}}  {line}", highlight=False, soft_wrap=True, markup=False)
