"""A study's results as text for other programs: Markdown, LaTeX, CSV and JSON."""

import csv
import io
import json
from dataclasses import asdict
from math import isfinite
from statistics import mean, stdev
from typing import Any

from ghostbatch.report.entries import Entry, entries_of
from ghostbatch.report.runs import Results, Run
from ghostbatch.report.table import Table, by_columns, row_table, show_spread

RUN_FIELDS = (
    *("accuracy", "recalibrated_accuracy", "ema_accuracy", "loss", "updates", "epochs"),
    *("distance", "seconds"),
)


def to_markdown(results: Results) -> str:
    """Return the table of each row."""
    parts = []
    for row, entries in entries_of(results).items():
        parts += [f"### {_escape_markdown(row)}\n", *markdown_lines(row_table(entries)), ""]
    return "\n".join(parts).rstrip()


def markdown_lines(table: Table) -> list[str]:
    """Return the lines of a table, without its title and notes."""
    lines = [table.headers, ("---", *["---:"] * (len(table.headers) - 1)), *table.lines]
    return ["| " + " | ".join(map(_escape_markdown, line)) + " |" for line in lines]


def _escape_markdown(text: str) -> str:
    for character in "\\`*_[]<>|":
        text = text.replace(character, f"\\{character}")
    return " ".join(text.split())


def to_latex(results: Results) -> str:
    """Return the paper's table, with booktabs: a row of the study is a row of the table.

    Rows with other columns have a table of their own. Marks are notes below it.
    """
    return "\n\n".join(_tabular(rows) for rows in by_columns(entries_of(results)))


def _tabular(rows: dict[str, list[Entry]]) -> str:
    columns = [entry.column for entry in next(iter(rows.values()))]
    notes: dict[str, str] = {}
    lines = []
    for row, entries in rows.items():
        lines.append(_latex_line(row, [_latex_cell(entry, notes) for entry in entries]))
        if any(entry.paper is not None for entry in entries):
            papers = ["" if e.paper is None else f"{e.paper:.2f}" for e in entries]
            lines.append(_latex_line("the paper", papers))
    return "\n".join(
        [
            "% needs \\usepackage{booktabs}; accuracy in %, mean and standard deviation over seeds",
            f"\\begin{{tabular}}{{l{'r' * len(columns)}}}",
            "\\toprule",
            _latex_line("", [_escape_latex(column) for column in columns]),
            "\\midrule",
            *lines,
            "\\bottomrule",
            *(
                f"\\multicolumn{{{len(columns) + 1}}}{{l}}"
                f"{{\\footnotesize $^{{{letter}}}$ {_escape_latex(note)}}} \\\\"
                for note, letter in notes.items()
            ),
            "\\end{tabular}",
        ]
    )


def _latex_line(name: str, cells: list[str]) -> str:
    return " & ".join([_escape_latex(name), *cells]) + " \\\\"


def _latex_cell(entry: Entry, notes: dict[str, str]) -> str:
    """Return a cell with the letters of its marks; add new ones to ``notes``."""
    for mark in entry.marks:
        notes.setdefault(mark, str(len(notes) + 1))
    letters = ",".join(notes[mark] for mark in entry.marks)
    text = show_spread(entry.accuracies.values(), 2)
    text = text.replace("±", "\\pm").replace("–", "\\mbox{--}")
    return f"${text}^{{{letters}}}$" if letters else f"${text}$"


def _escape_latex(text: str) -> str:
    r"""Return text that LaTeX prints as it is.

    >>> print(_escape_latex("50 % of $a_b"))
    50 \% of \$a\_b
    """
    special = {"\\": "\\textbackslash{}", "~": "\\textasciitilde{}", "^": "\\textasciicircum{}"}
    special |= {character: f"\\{character}" for character in "&%$#_{}"} | {"×": "$\\times$"}
    return "".join(special.get(character, character) for character in text)


def to_csv(results: Results) -> str:
    """Return a line for each run, finished or not."""
    text = io.StringIO()
    lines = [
        {"row": row, "column": entry.column}
        | _run_data(run, paper=entry.paper, marks="; ".join(entry.marks))
        for row, entries in entries_of(results).items()
        for entry in entries
        for run in entry.group.runs
    ]
    names = dict.fromkeys(name for line in lines for name in line) or ["row"]
    writer = csv.DictWriter(text, list(names), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue().rstrip("\n")


def _run_data(run: Run, **more: Any) -> dict[str, Any]:
    """Return what a run did, ``more``, and its settings and origin."""
    recipe, header = run.plan.recipe, run.header
    return {
        **{"seed": run.seed, "status": run.status},
        **{name: _finite(getattr(run.summary, name, None)) for name in RUN_FIELDS},
        **more,
        **{"batch": recipe.batch, "ghost": recipe.ghost, "lr": run.plan.regime.lr},
        **{"device": header["device"], "date": run.date, "commit": header.get("commit")},
        **header.get("versions", {}),
    }


def _finite(value: float | None) -> float | None:
    return value if value is not None and isfinite(value) else None


def to_json(results: Results) -> str:
    """Return one object: the study, and its rows with their columns and runs."""
    rows = {
        row: {entry.column: _entry_data(entry) for entry in entries}
        for row, entries in entries_of(results).items()
    }
    study = {"study": results.study.name, "scale": results.study.scale}
    return json.dumps({**study, "rows": rows}, indent=2)


def _entry_data(entry: Entry) -> dict[str, Any]:
    values = entry.accuracies.values()
    return {
        "accuracy": mean(values) if values else None,
        "deviation": stdev(values) if len(values) > 1 else None,
        "n": len(values),
        "paper": entry.paper,
        "difference": entry.difference,
        "gap": entry.gap and asdict(entry.gap),
        "marks": entry.marks,
        "recipe": entry.recipe.as_dict(),
        "runs": [_run_data(run) for run in entry.group.runs],
    }


EXPORTS = {"markdown": to_markdown, "latex": to_latex, "csv": to_csv, "json": to_json}
"""By the name of the flag."""
