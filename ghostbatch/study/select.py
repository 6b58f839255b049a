"""A study with fewer epochs, other data, held-out images, other arithmetic or a warm-up."""

import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from math import isfinite

import torch

from ghostbatch.data import find_dataset, find_info
from ghostbatch.errors import InputError
from ghostbatch.nn import find_model
from ghostbatch.optim import Epochs
from ghostbatch.recipe import Precision, Recipe
from ghostbatch.study.declare import Cell, Study
from ghostbatch.study.rows import warmed_up


def scaled(study: Study, scale: float) -> Study:
    """Return the study with all times of all columns' regimes multiplied by ``scale``."""
    if not (isfinite(scale) and scale > 0):
        raise InputError("scale", f"{scale:g} is not above 0", "use 0.1, for example")
    stretched = _each(study, lambda r: replace(r, regime=r.regime.stretched(scale)))
    return replace(stretched, scale=study.scale * scale)


def on_data(study: Study, data: str) -> Study:
    """Return the study with another data set in every row, and without the paper's figures.

    A row that is called after its data set is called after the new one: resnet44-cifar10 becomes
    resnet44-cifar100. `check_networks` refuses images that do not fit.
    """
    find_dataset(data)
    label = re.sub(r"[^\w.+-]+", "-", data)  # for folders; it may be a path
    rows = {}
    for name, row in study.rows.items():
        (before, *_) = {recipe.data for recipe in row.columns.values()}
        new = f"{name.removesuffix(before)}{label}" if name.endswith(f"-{before}") else name
        rows[new] = replace(row, paper={})
    return _each(replace(study, rows=rows), lambda r: replace(r, data=data))


def held_out(study: Study, images: int) -> Study:
    """Return the study with ``images`` training images kept aside, and evaluated on these."""
    return _each(study, lambda r: replace(r, holdout=images))


def in_precision(study: Study, precision: Precision) -> Study:
    """Return the study in another arithmetic."""
    return _each(study, lambda r: replace(r, precision=precision))


def with_warmup(study: Study, epochs: Epochs) -> Study:
    """Return the study with a warm-up of ``epochs`` epochs in every column."""
    return _each(study, lambda r: warmed_up(r, epochs))


def _each(study: Study, change: Callable[[Recipe], Recipe]) -> Study:
    """Return the study with every recipe changed."""
    instruments = tuple(
        replace(each, recipe=each.recipe and change(each.recipe)) for each in study.instruments
    )
    rows = {
        name: replace(row, columns={column: change(r) for column, r in row.columns.items()})
        for name, row in study.rows.items()
    }
    return replace(study, rows=rows, instruments=instruments)


def check_networks(cells: Iterable[Cell]) -> None:
    """Refuse a data set that does not fit a cell's network, for example with too small images.

    Networks are built without memory for their weights.
    """
    rows = {(c.recipe.model, c.recipe.data, c.recipe.image_size): c.row for c in cells}
    for (model, data, image_size), row in rows.items():
        info = find_info(data, image_size)
        channels, size, _ = info.shape
        try:
            with torch.device("meta"):
                find_model(model)(info.classes, in_channels=channels, image_size=size)
        except InputError as error:
            problem = f"{data} does not fit the row {row}: {error.problem}"
            remedy = "choose another data set, or other rows by --rows"
            raise InputError("data", problem, remedy) from None
