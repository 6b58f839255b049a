"""The folder of a run or a study whose command names none: one for each recipe or selection."""

import json
import re
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Any

from ghostbatch.recipe import Recipe

RUNS = Path("runs")
LONGEST = 60
"""Characters of a folder's name; a hash stands for changes beyond these."""
UNSAFE = r"[^A-Za-z0-9_.+-]+"
"""Characters that stay out of the names of folders."""


def folder_of(name: str, base: Recipe, recipe: Recipe) -> Path:
    """Return the folder of a recipe that flags made of the recipe called ``name``.

    It is runs/f1-digits if nothing was changed, and runs/f1-digits-batch-64-lr-0.2 for a batch of
    64 and a learning rate of 0.2. The same command has the same folder, so that it continues.
    """
    before, after = _flat(base.as_dict()), _flat(recipe.as_dict())
    if recipe.optimizer.kind != base.optimizer.kind:  # options at their defaults are no changes
        before |= _flat(asdict(type(recipe.optimizer)()), "optimizer.")
    changes = {field: value for field, value in after.items() if before.get(field) != value}
    return folder_of_changes(name, changes)


def folder_of_repeat(original: Path, written: Recipe, recipe: Recipe) -> Path:
    """Return the folder for a repetition of the run in ``original``; never that folder itself.

    Args:
        original: the run to repeat.
        written: its recipe.
        recipe: the recipe after the changes by flags, if any.

    """
    original = original.resolve()
    name = original.name
    if original.parent != RUNS.resolve():  # a run elsewhere may have the same name
        name += f"-{sha256(str(original).encode()).hexdigest()[:6]}"
    if recipe == written:
        return _folder([name, "again"], {"repeats": str(original)})
    return folder_of(name, written, recipe)


def folder_of_changes(name: str, changes: dict[str, Any]) -> Path:
    """Return the folder of a recipe or a study with other values than its own, such as a scale.

    >>> str(folder_of_changes("table1", {"scale": 0.1, "data": "digits"}))
    'runs/table1-scale-0.1-data-digits'
    """
    return _folder([name, *map(_label, changes.items())], changes)


def _flat(fields: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested fields by their path: {"regime": {"lr": 0.1}} has "regime.lr"."""
    flat: dict[str, Any] = {}
    for name, value in fields.items():
        path = f"{prefix}{name}"
        flat |= _flat(value, f"{path}.") if isinstance(value, dict) else {path: value}
    return flat


def _label(change: tuple[str, Any]) -> str:
    """Return a changed field and its value as part of a name: batch-64, no-augment, ghost-none."""
    field, value = change
    name = field.removesuffix(".kind").rpartition(".")[2].replace("_", "-")
    if isinstance(value, bool):
        return name if value else f"no-{name}"
    if isinstance(value, list):
        value = ",".join(":".join(map(str, drop)) for drop in value)
    return f"{name}-{value if value not in (None, '') else 'none'}"


def _folder(labels: list[str], content: dict[str, Any]) -> Path:
    """Return the folder called by the labels.

    If its name would be too long or unsafe, it is the first labels and a hash of ``content``.
    """
    name = "-".join(labels)
    if len(name) <= LONGEST and not re.search(UNSAFE, name):
        return RUNS / name
    digest = sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:6]
    name, *others = (re.sub(UNSAFE, "-", label)[: LONGEST - 7] for label in labels)
    for label in others:
        if len(f"{name}-{label}-{digest}") > LONGEST:
            break
        name = f"{name}-{label}"
    return RUNS / f"{name}-{digest}"
