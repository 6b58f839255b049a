"""Published results: run folders to small JSON files, and those to docs/results.md.

    python scripts/results.py collect RUN --column COLUMN --commit COMMIT --note NOTE
    python scripts/results.py write

``collect`` copies what a finished run folder says (recipe, summary, records, hardware) to
``results/table1/ROW/COLUMN/seed-K.json``; weights are never kept. ``write`` makes docs/results.md
from these files alone. A test checks that the page is current.
"""

import argparse
import json
from pathlib import Path
from statistics import mean, stdev
from typing import Any

HERE = Path(__file__).resolve().parents[1]
RESULTS = HERE / "results" / "table1"
PAGE = HERE / "docs" / "results.md"
FIELDS = ("update", "epoch", "loss", "accuracy", "lr", "distance", "gradient_norm", "clipped")
POINTS = 200
"""Records of a split that are kept, at most."""

PAPER = {
    "resnet44-cifar10": {"SB": 92.83, "LB": 86.10, "+LR": 89.30, "+GBN": 90.50, "+RA": 93.07},
}
"""Validation accuracy in percent, table 1 of the paper."""

COLUMNS = {  # in the order of the page
    "SB": "batch 128",
    "LB": "batch 4096",
    "+LR": "and rates × √32",
    "+GBN": "and ghosts of 128",
    "+RA": "and as many updates as SB",
    "LB, warm-up": "batch 4096, 5 epochs of warm-up",
    "+LR, warm-up": "and rates × √32",
    "+GBN, warm-up": "and ghosts of 128",
    "+RA, warm-up": "and as many updates as SB",
}
"""What each column is."""

HEADER = """\
# Results on real data

Made from the files in [results/table1](../results/table1) by `python scripts/results.py write`.
Each file holds one run: its recipe, its records, its hardware and its commit. Accuracies are those
of the last update on the test set, in percent; over several seeds the mean ± the sample standard
deviation. The regimes are the paper's. The warm-up of 5 epochs is ours: it was taken from earlier
single runs, not among these files, that were evaluated on this same test set. So the columns with a
warm-up are not free of selection on it.

A cell is `ghostbatch train resnet44-cifar10 --precision bf16` with the flags of its column
(`--batch 4096`, `--lr-rule sqrt`, `--ghost 128`, `--regime.warmup 5`, `--seed K`). These runs
called `gb.train` with the same recipes, from a script that is not kept.
"""

NOTES = """
The large-batch columns are run twice: as the paper prints them, and with a warm-up of 5 epochs.
Without a warm-up the first updates at the scaled rate do damage that takes many epochs to repair.
Test accuracy of +GBN, seed 0, in percent after {epochs} epochs:
{without}; with the warm-up: {with_it}.

A run of +GBN without a warm-up, seed 1, was cut off at epoch 18 when the time on the GPU ended, and
is left out. Not run yet: the other seeds of the large-batch columns, +RA, and the other rows of the
paper's tables.
"""


def collect(run: Path, column: str, commit: str, note: str) -> Path:
    """Write the result file of a finished run folder; return its path."""
    header, summary = (
        json.loads((run / f"{name}.json").read_text()) for name in ("run", "summary")
    )
    recipe = header["recipe"]
    lines = (run / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    result = {
        "row": f"{recipe['model']}-{recipe['data']}",
        "column": column,
        "seed": recipe["seed"],
        "recipe": recipe,
        "samples": header["samples"],
        "summary": {name: value for name, value in summary.items() if name != "checksum"},
        "device": header["device"],
        "versions": header["versions"],
        "commit": commit,
        "note": note,
        "fields": FIELDS,
        **{
            split: _thinned([[r.get(f) for f in FIELDS] for r in records if r["split"] == split])
            for split in ("train", "validation")
        },
    }
    target = RESULTS / result["row"] / column.replace(", ", "-") / f"seed-{recipe['seed']}.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    lines = {split: _one_line_each(result.pop(split)) for split in ("train", "validation")}
    head = json.dumps(result, indent=1).removesuffix("\n}")
    curves = ",\n".join(f' "{split}": [\n{rows}\n ]' for split, rows in lines.items())
    target.write_text(f"{head},\n{curves}\n}}\n")
    return target


def _thinned(records: list[Any]) -> list[Any]:
    """Return at most `POINTS` records, evenly chosen, with the first and the last."""
    if len(records) <= POINTS:
        return records
    return [records[round(k * (len(records) - 1) / (POINTS - 1))] for k in range(POINTS)]


def _one_line_each(records: list[list[Any]]) -> str:
    """Return the records as JSON, one per line, with numbers of seven digits."""
    rounded = [[v if v is None else float(f"{v:.7g}") for v in record] for record in records]
    return ",\n".join(f"  {json.dumps(record)}" for record in rounded)


def page() -> str:
    """Return docs/results.md."""
    files = [json.loads(path.read_text()) for path in sorted(RESULTS.rglob("seed-*.json"))]
    parts = [HEADER]
    for row in sorted({each["row"] for each in files}):
        runs = [each for each in files if each["row"] == row]
        machines = sorted({(r["device"], r["versions"]["torch"]) for r in runs})
        devices = ", ".join(f"{device}, torch {torch.split('+')[0]}" for device, torch in machines)
        parts.append(f"## {row}\n\n{devices}, {runs[0]['recipe']['precision']}.\n")
        parts.append("| column | | accuracy % | the paper | seeds | epochs | updates | s / run |")
        parts.append("|---|---|---|---|---|---|---|---|")
        for column, what in COLUMNS.items():
            cell = [each for each in runs if each["column"] == column]
            if cell:
                parts.append(_line(row, column, what, [each["summary"] for each in cell]))
    notes = sorted({each["note"] for each in files if each["note"]})
    parts.append("".join(f"\n{note}\n" for note in notes) + NOTES.format(**_early(files)))
    return "\n".join(parts)


def _early(files: list[dict[str, Any]]) -> dict[str, str]:
    """Return the accuracy of +GBN at a few early evaluations, without and with a warm-up."""
    curves = []
    for column in ("+GBN", "+GBN, warm-up"):
        (run,) = (f for f in files if (f["column"], f["seed"]) == (column, 0))
        epoch, accuracy = (run["fields"].index(name) for name in ("epoch", "accuracy"))
        curves.append(
            [(r[epoch], r[accuracy]) for r in run["validation"] if 4 < r[epoch] < 41][::2]
        )
    return {
        "epochs": ", ".join(f"{epoch:.0f}" for epoch, _ in curves[0]),
        "without": ", ".join(f"{accuracy:.0f}" for _, accuracy in curves[0]),
        "with_it": ", ".join(f"{accuracy:.0f}" for _, accuracy in curves[1]),
    }


def _line(row: str, column: str, what: str, runs: list[dict[str, Any]]) -> str:
    accuracies = [run["accuracy"] for run in runs]
    spread = f" ± {stdev(accuracies):.2f}" if len(runs) > 1 else ""
    paper = PAPER.get(row, {}).get(column.partition(",")[0])
    paper_text = "–" if paper is None else f"{paper:.2f}"
    last = runs[0]
    seconds = mean(run["seconds"] for run in runs)
    return (
        f"| {column} | {what} | {mean(accuracies):.2f}{spread} | {paper_text} | {len(runs)} "
        f"| {last['epochs']:.0f} | {last['updates']:,} | {seconds:.0f} |"
    )


def main() -> None:
    """Run one of the two commands."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("collect")
    one.add_argument("run", type=Path)
    for name in ("column", "commit"):
        one.add_argument(f"--{name}", required=True)
    one.add_argument("--note", default="")
    commands.add_parser("write")
    options = parser.parse_args()
    if options.command == "collect":
        print(collect(options.run, options.column, options.commit, options.note))
    else:
        PAGE.write_text(page())


if __name__ == "__main__":
    main()
