"""``study.json``: the part of a study that its folder holds, for reports and later commands."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ghostbatch.errors import InputError
from ghostbatch.files import atomic_file
from ghostbatch.recipe import Recipe
from ghostbatch.study.declare import Cell, Row, Study
from ghostbatch.study.instruments import Instrument

NAME = "study.json"


def held_part(study: Study, cells: Sequence[Cell], earlier: Study | None) -> Study:
    """Return the study with only the rows, columns and seeds of ``cells`` and of ``earlier``."""
    earlier = earlier or Study(study.name, seeds=())
    if (found := _mismatch(study, earlier)) is not None:
        raise InputError("out", f"the folder holds {found}", "choose another folder")
    held = {(row, column) for row, entry in earlier.rows.items() for column in entry.columns}
    held |= {(cell.row, cell.column) for cell in cells}
    rows = {}
    for name, row in study.rows.items():
        if columns := {c: recipe for c, recipe in row.columns.items() if (name, c) in held}:
            rows[name] = replace(row, columns=columns)
    seeds = {*earlier.seeds, *(cell.recipe.seed for cell in cells)}
    return replace(study, rows=rows, seeds=tuple(sorted(seeds)))


def _mismatch(study: Study, earlier: Study) -> str | None:
    """Return what a folder holds that does not belong to the study; None if all does."""
    if earlier.name != study.name:
        return f"the study {earlier.name}"
    if earlier.rows and earlier.scale != study.scale:
        return f"runs at scale {earlier.scale:g}, not {study.scale:g}"
    for row, entry in earlier.rows.items():
        declared = study.rows[row].columns if row in study.rows else {}
        for column, recipe in entry.columns.items():
            if column not in declared:
                return f"{row} {column}, which this study does not have"
            if fields := declared[column].differences(recipe.as_dict()):
                return f"{row} {column} of another recipe (other {', '.join(fields)})"
    return None


def read_study(folder: Path) -> Study | None:
    """Read the ``study.json`` of a folder; return None if there is none."""
    path = folder / NAME
    if not path.is_file():
        return None
    try:
        fields = json.loads(path.read_text())
        rows = {}
        for name, row in fields["rows"].items():
            columns = {column: Recipe.from_dict(each) for column, each in row["columns"].items()}
            rows[name] = Row(columns, tuple(row["figures"]), row["note"], row["paper"])
        instruments = tuple(
            Instrument(each["name"], each["recipe"] and Recipe.from_dict(each["recipe"]))
            for each in fields["instruments"]
        )
        return Study(
            name=fields["name"],
            rows=rows,
            seeds=tuple(fields["seeds"]),
            instruments=instruments,
            scale=fields["scale"],
            evaluations=fields["evaluations"],
            targets=tuple(fields["targets"]),
        )
    except (ValueError, TypeError, KeyError, AttributeError):
        remedy = "delete it and run the study again"
        raise InputError("folder", f"{path} cannot be read", remedy) from None


def write_study(study: Study, folder: Path) -> None:
    """Write a study to the ``study.json`` of a folder."""
    with atomic_file(folder / NAME) as file:
        file.write(json.dumps(study, default=_fields, indent=2).encode() + b"\n")


def _fields(part: Study | Row | Instrument | Recipe) -> dict[str, Any]:
    return part.as_dict() if isinstance(part, Recipe) else vars(part)
