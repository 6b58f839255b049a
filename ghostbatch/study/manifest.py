"""``study.json``: which rows, columns, seeds, figures and instruments a study's folder holds."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ghostbatch.errors import InputError
from ghostbatch.files import atomic_file
from ghostbatch.study.studies import FIGURES, Cell, Study

NAME = "study.json"


@dataclass(frozen=True)
class RowEntry:
    """A `Row` without its recipes."""

    columns: tuple[str, ...]
    figures: tuple[str, ...] = FIGURES
    note: str = ""


@dataclass(frozen=True)
class Manifest:
    """What a report needs to know of a study besides its run folders, ROW/COLUMN/seed-K."""

    name: str
    rows: dict[str, RowEntry] = field(default_factory=dict)
    seeds: tuple[int, ...] = ()
    instruments: tuple[str, ...] = ()

    @classmethod
    def of(cls, study: Study, cells: Sequence[Cell], earlier: "Manifest | None") -> "Manifest":
        """Describe a study: the cells that are run now, and those of its earlier manifest."""
        earlier = earlier or cls(study.name)
        if earlier.name != study.name:
            problem = f"the folder holds the study {earlier.name}"
            raise InputError("out", problem, "choose another folder")
        held = {(row, column) for row, entry in earlier.rows.items() for column in entry.columns}
        held |= {(cell.row, cell.column) for cell in cells}
        rows = {}
        for name, row in study.rows.items():
            columns = tuple(column for column in row.columns if (name, column) in held)
            if columns:
                rows[name] = RowEntry(columns, row.figures, row.note)
        seeds = {*earlier.seeds, *(cell.recipe.seed for cell in cells)}
        instruments = tuple(instrument.name for instrument in study.instruments)
        return cls(study.name, rows, tuple(sorted(seeds)), instruments)

    @classmethod
    def read(cls, folder: Path) -> "Manifest | None":
        """Read the manifest of a folder; return None if there is none."""
        path = folder / NAME
        if not path.is_file():
            return None
        try:
            fields = json.loads(path.read_text())
            rows = {name: RowEntry(**_tuples(row)) for name, row in fields.pop("rows").items()}
            return cls(rows=rows, **_tuples(fields))
        except (ValueError, TypeError, KeyError, AttributeError):
            raise InputError(
                "folder", f"{path} cannot be read", "delete it and run the study again"
            ) from None

    def write(self, folder: Path) -> None:
        """Write the manifest into a study's folder."""
        with atomic_file(folder / NAME) as file:
            file.write(json.dumps(asdict(self), indent=2).encode() + b"\n")


def _tuples(fields: dict[str, Any]) -> dict[str, Any]:
    """Undo what JSON does to tuples."""
    return {key: tuple(v) if isinstance(v, list) else v for key, v in fields.items()}
