"""``ghostbatch train``: one run."""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field, fields, replace
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console

from ghostbatch.cli import DIVERGED
from ghostbatch.cli.about import about_all, about_one
from ghostbatch.cli.default_out import folder_of, folder_of_repeat
from ghostbatch.cli.flags import cores, parse_words, print_help, take_name
from ghostbatch.cli.notices import is_first_rank
from ghostbatch.cli.words import Words, sort_words
from ghostbatch.data import OnBadImage, find_info, is_folder
from ghostbatch.data.skipped import BAD_IMAGE_LIMIT
from ghostbatch.errors import InputError
from ghostbatch.optim import OPTIMIZERS, OptimizerKind
from ghostbatch.recipe import Recipe
from ghostbatch.recipes import RECIPES, find_recipe
from ghostbatch.report.table import show_batches, show_rates
from ghostbatch.report.tensorboard import TensorBoard
from ghostbatch.report.terminal import (
    TrainProgress,
    about,
    plain_console,
    print_fields,
    progress_bars,
)
from ghostbatch.train import (
    Record,
    Summary,
    data_bytes,
    estimate,
    find_device,
    measure_pace,
    read_header,
    train,
)
from ghostbatch.train.folder import RunFolder
from ghostbatch.train.ranks import TIMEOUT
from ghostbatch.train.reference import read_drop_targets


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The arguments of `train` other than the recipe."""

    out: Path | None = None
    """The run's folder; None is runs/RECIPE, with the changed fields in its name."""
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
    """Samples per backward pass, over all ranks: less memory, the same numbers up to rounding."""
    data_dir: Path | None = None
    """Folder of the data sets; None is GHOSTBATCH_DATA, or the folder data here."""
    download: bool = False
    """Download the data set if it is not there."""
    workers: int = field(default_factory=cores)
    """Processes that decode the images of a folder."""
    on_bad_image: OnBadImage = "fatal"
    """What to do with an image that cannot be read: stop, or warn and use another one."""
    bad_image_limit: float = BAD_IMAGE_LIMIT
    """With on_bad_image skip: largest fraction of the images that may be unreadable."""
    capture: bool = True
    """On one GPU, run updates as CUDA graphs."""
    deterministic: bool = False
    """On a GPU, use only algorithms that repeat their bits; slower."""
    noise_scale: bool = False
    """At each evaluation, also measure the gradient noise scale."""
    sharpness: bool = False
    """At each evaluation, also measure the sharpness of the training loss."""
    timeout: float = TIMEOUT
    """Seconds that ranks wait for each other before the run ends."""


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """Run one recipe; every field of the recipe is a flag."""

    recipe: Annotated[Recipe, tyro.conf.arg(name="")]
    run: Annotated[RunOptions, tyro.conf.arg(name="")]
    optimizer: OptimizerKind
    """Which optimizer; --help together with it shows its options."""
    dry_run: bool = False
    """Print the recipe, its updates, and estimates of memory and time; run nothing."""
    tensorboard: bool = False
    """Also write the records for TensorBoard, into the run's folder."""
    from_: Annotated[Path | None, tyro.conf.arg(name="from")] = None
    """Repeat the run in this folder, in place of RECIPE; other flags change its recipe."""


def command(argv: Sequence[str]) -> None:
    """Run one recipe and print its progress; exit with `DIVERGED` if it diverges."""
    options, out, name = _read(argv)
    run = replace(options.run, out=out)
    console = plain_console(quiet=not is_first_rank())
    if options.dry_run:
        _print_estimates(options.recipe, run, console)
        return
    board = TensorBoard(out) if options.tensorboard else None
    bars = progress_bars(console)
    progress = TrainProgress(name, out, bars)

    def show(record: Record) -> None:
        if board is not None:
            board(record)
        progress.on_record(record)

    try:
        summary = train(
            options.recipe, **vars(run), on_record=show, on_progress=progress.on_progress
        )
    finally:
        bars.stop()
    console.print(_closing_line(summary, out, was_ended=not progress.started))
    if summary.status == "diverged":
        raise SystemExit(DIVERGED)


def _closing_line(summary: Summary, out: Path, was_ended: bool) -> str:
    """Return how the run ended, now or in an earlier command."""
    status: str = summary.status
    if was_ended:
        status = {"finished": "was finished already", "diverged": "had diverged already"}[status]
    reason = f" ({summary.reason})" if summary.reason else ""
    took = timedelta(seconds=round(summary.seconds))
    skipped = summary.skipped_images + summary.skipped_test_images
    where = " on held-out images" if summary.held_out else ""
    if summary.ema_accuracy is not None:
        where += f", {summary.ema_accuracy:.2f} % of the averaged weights,"
    return (
        f"{status}{reason}: accuracy {summary.accuracy:.2f} %{where} after {summary.updates:,} "
        f"updates ({summary.epochs:.4g} epochs) in {took}; "
        f"{f'{skipped:,} images skipped; ' if skipped else ''}{out}"
    )


def _read(argv: Sequence[str]) -> tuple[TrainOptions, Path, str]:
    """Return the options of a command, the run's folder, and what to call the recipe."""
    words = sort_words(TrainOptions, argv, "train")
    if "from" in words.values and not words.help:
        return _read_repeat(words)
    name = take_name(words, "recipe", RECIPES)
    recipe = find_recipe(name or "f1-digits")
    default = _defaults(recipe, RunOptions(), words)
    if name is None:
        more = "The defaults below are those of f1-digits; name another recipe to see its own."
        about = about_all(TrainOptions, "RECIPE", RECIPES, more)
        print_help(TrainOptions, "train RECIPE", about, default)
    about = about_one(TrainOptions, name, RECIPES)
    options = parse_words(TrainOptions, words, f"train {name}", default, about)
    return options, options.run.out or folder_of(name, recipe, options.recipe), name


def _defaults(recipe: Recipe, run: RunOptions, words: Words) -> TrainOptions:
    """Return the values of flags that are not given, with the optimizer that --optimizer names.

    Refuse an option of another optimizer.
    """
    kind: Any = words.values.get("optimizer", recipe.optimizer.kind)
    if kind != recipe.optimizer.kind and kind in OPTIMIZERS:  # any word may stand beside --help
        recipe = copy(recipe)
        # Other flags may be needed for this optimizer, so only the parser makes the checks.
        object.__setattr__(recipe, "optimizer", OPTIMIZERS[kind]())
    own = [f"optimizer.{each.name}" for each in fields(recipe.optimizer)]
    for flag in words.values:
        if flag.startswith("optimizer.") and flag not in own and not words.help:
            remedy = f"use {' or '.join(f'--{each}' for each in own)}, or set --optimizer"
            raise InputError(flag, f"{kind} has no such option", remedy)
    return TrainOptions(recipe=recipe, run=run, optimizer=recipe.optimizer.kind)


def _read_repeat(words: Words) -> tuple[TrainOptions, Path, str]:
    """Return the options that repeat the run of --from, changed by other flags, and as `_read`.

    Whatever changes rounding on the CPU is as it was: the threads and the micro-batch.
    """
    if words.names:
        problem = f"the recipe {words.names[0]} was named, too"
        raise InputError("from", problem, "leave out one of them")
    path = words.values["from"]
    folder = path.parent if path.name == "run.json" else path
    if not (folder / "run.json").is_file():
        raise InputError("from", f"{path} holds no run", "name a folder that has a run.json")
    try:
        header = read_header(folder)
    except InputError as error:
        raise InputError("from", error.problem, "name another run") from None
    recipe, micro = Recipe.from_dict(header["recipe"]), header.get("micro")
    run = RunOptions(
        device="cpu" if header["device"].startswith("cpu") else None,
        threads=header["threads"],
        evaluations=header.get("evaluations", RunOptions.evaluations),
        noise_scale=header.get("noise_scale", False),
        sharpness=header.get("sharpness", False),
        micro=None if micro == recipe.batch else micro,
    )
    options = parse_words(TrainOptions, words, "train", _defaults(recipe, run, words))
    out = options.run.out or folder_of_repeat(folder, recipe, options.recipe)
    return options, out, f"that of {folder}"


def _print_estimates(recipe: Recipe, run: RunOptions, console: Console) -> None:
    """Print the recipe, its updates, and the memory and time that it would need here."""
    info = find_info(recipe.data, recipe.image_size, recipe.holdout)
    plan = recipe.plan(info.samples)
    if run.out is not None:
        RunFolder(run.out, plan)  # refuses what the run would refuse, as the next line does
    if recipe.hold == "distance":
        read_drop_targets(plan)
    data = "the images are decoded during the run"
    if not is_folder(recipe.data):
        data = f"{data_bytes(info) / 2**20:,.0f} MiB for the data"
    device = find_device(run.device)
    needs = estimate(plan, info, device, run.micro)
    pace = measure_pace(plan, info, device, run.micro, run.threads, run.capture)
    lines = {
        "folder": str(run.out),
        **{field: _show(value) for field, value in recipe.as_dict().items() if field != "regime"},
        "batch": show_batches(plan),
        "rates (update)": show_rates(plan),
        "weight decay": f"{plan.regime.weight_decay:g}",
        "updates": f"{plan.updates:,}",
        "epochs": f"{plan.epoch(plan.updates):.4g}",
        "parameters": f"{needs.parameters:,}",
        "memory": f"about {needs.bytes / 2**20:,.0f} MiB of {device} for weights and activations, "
        f"{data}",
        "time": f"{about(pace.seconds(plan, run.evaluations))} on this {device}, "
        f"{recipe.batch / pace.update:,.0f} images/s",
    }
    print_fields(lines, console)


def _show(value: Any) -> str:
    """Return a field of a recipe as text; an optimizer is its name and its options."""
    if not isinstance(value, dict):
        return str(value)
    options = (f"{name} {option}" for name, option in value.items() if name != "kind")
    return ", ".join([value["kind"], *options])
