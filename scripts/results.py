"""Published results: runs of studies to small JSON files, and those to pages and figures.

    python scripts/results.py collect STUDY --commit COMMIT [--note NOTE]
    python scripts/results.py write

``collect`` copies what the finished runs of a study's folder say (recipe, summary, thinned records,
hardware) to ``results/STUDY/ROW/COLUMN/seed-K.json``; weights are never kept. ``write`` makes
docs/results.md, its figures and the table at the top of the README from these files alone: it
restores run folders without weights from them, and `ghostbatch.report` makes tables and figures of
those. ``about.md`` in the folder of a study or a row is what somebody wrote of it. A test checks
that all of it is current.
"""

import argparse
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from shlex import quote
from tempfile import TemporaryDirectory
from typing import Any

from ghostbatch.recipe import Recipe
from ghostbatch.report.charts import Plot, file_name
from ghostbatch.report.drawing import draw_svg
from ghostbatch.report.entries import entries_of
from ghostbatch.report.exports import markdown_lines
from ghostbatch.report.figures import row_figures
from ghostbatch.report.instruments import instrument_figures
from ghostbatch.report.runs import Results, read_results
from ghostbatch.report.table import row_table, show_spread
from ghostbatch.report.targets import target_figures
from ghostbatch.study import STUDIES, Study
from ghostbatch.study.manifest import write_study
from ghostbatch.study.rows import COLUMNS

HERE = Path(__file__).resolve().parents[1]
RESULTS, PAGE, README = HERE / "results", HERE / "docs" / "results.md", HERE / "README.md"
FIGURES = HERE / "docs" / "figures"
FIELDS = ("update", "epoch", "loss", "accuracy", "lr", "distance", "gradient_norm", "clipped")
POINTS = 200
"""Records of a split that are kept, at most."""

WARM_UP = ", warm-up"
"""Ends the column of a run with a warm-up that its study does not declare."""

NAMES = {
    "f1-mnist": "F1, MNIST",
    "c1-cifar10": "C1, CIFAR-10",
    "resnet44-cifar10": "ResNet44, CIFAR-10",
    "vgg-cifar10": "VGG, CIFAR-10",
    "c3-cifar100": "C3, CIFAR-100",
    "wresnet16-4-cifar100": "WResNet16-4, CIFAR-100",
}
MARKS = "<!-- results: made by scripts/results.py -->", "<!-- end of results -->"

INTRODUCTION = """\
# Results on real data

Made from the files in [results](../results) by `python scripts/results.py write`. Each file holds
one run: its recipe, its records, its hardware and its commit. Accuracies are those of the last
update on the test set, in percent; over several seeds (n) the mean ± the sample standard deviation.

- "recalibrated": the accuracy with running statistics averaged over the training set.
- "gap": the difference from the first column over the same seeds, with a 95 % interval if there are
  several.
- "ghosts": how many a batch has; "plain" is plain batch norm.
- "distance": how far the weights end from their initial values.
- "s / run": the mean time of a run, in seconds. Several small runs shared the GPU.
"""


def collect(folder: Path, commit: str, note: str) -> list[Path]:
    """Write the result files of a study's finished runs; return their paths."""
    name = json.loads((folder / "study.json").read_text())["name"]
    declared = STUDIES[name]().rows
    paths = []
    for path in sorted(folder.rglob("summary.json")):
        run = path.parent
        row, column = run.parts[-3:-1]
        header = json.loads((run / "run.json").read_text())
        warmup = header["recipe"]["regime"]["warmup"]
        if warmup != declared[row].columns[column].regime.warmup:
            column += WARM_UP
        place = RESULTS / name / row / re.sub(r"[^\w.+-]+", "-", column)
        place.mkdir(parents=True, exist_ok=True)
        paths.append(place / f"{run.name}.json")
        origin = {"row": row, "column": column, "commit": commit, "note": note}
        paths[-1].write_text(_result(run, header | origin))
    return paths


def _result(run: Path, header: dict[str, Any]) -> str:
    """Return the content of the result file of a run."""
    summary = json.loads((run / "summary.json").read_text())
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    result = {
        **{name: header[name] for name in ("row", "column")},
        "seed": header["recipe"]["seed"],
        **{name: header[name] for name in ("recipe", "samples")},
        "summary": {name: value for name, value in summary.items() if name != "checksum"},
        **{name: header[name] for name in ("device", "versions", "engine", "commit", "note")},
        "fields": FIELDS,
    }
    head = json.dumps(result, indent=1).removesuffix("\n}")
    curves = {
        split: _thinned([[r.get(f) for f in FIELDS] for r in records if r["split"] == split])
        for split in ("train", "validation")
    }
    ends = ",\n".join(f' "{split}": [\n{_lines(rows)}\n ]' for split, rows in curves.items())
    return f"{head},\n{ends}\n}}\n"


def _thinned(records: list[Any]) -> list[Any]:
    """Return at most `POINTS` records, evenly chosen, with the first and the last."""
    if len(records) <= POINTS:
        return records
    return [records[round(k * (len(records) - 1) / (POINTS - 1))] for k in range(POINTS)]


def _lines(records: list[list[Any]]) -> str:
    """Return the records as JSON, one per line, with numbers of seven digits."""
    rounded = [[v if v is None else float(f"{v:.7g}") for v in record] for record in records]
    return ",\n".join(f"  {json.dumps(record)}" for record in rounded)


def read(study: str) -> dict[str, Results]:
    """Return what a report reads of the published runs of a study, by row."""
    declared, rows = STUDIES[study](), {}
    for row in declared.rows:
        paths = sorted((RESULTS / study / row).rglob("seed-*.json"))
        if runs := [json.loads(path.read_text()) for path in paths]:
            with TemporaryDirectory() as folder:
                write_study(_declared(declared, row, runs), Path(folder))
                for run in runs:
                    _restore(run, Path(folder))
                rows[row] = read_results(Path(folder))
    return rows


def _declared(study: Study, row: str, runs: list[dict[str, Any]]) -> Study:
    """Return a row of a study: its published columns and seeds, and columns with a warm-up."""
    recipes = {run["column"]: Recipe.from_dict(run["recipe"]) for run in runs}
    declared = study.rows[row]
    names = [f"{column}{end}" for end in ("", WARM_UP) for column in declared.columns]
    columns = {name: recipes[name] for name in names if name in recipes}
    known = {name: declared.paper.get(name.removesuffix(WARM_UP)) for name in columns}
    paper = {name: accuracy for name, accuracy in known.items() if accuracy is not None}
    seeds = tuple(sorted({run["seed"] for run in runs}))
    return replace(study, rows={row: replace(declared, columns=columns, paper=paper)}, seeds=seeds)


def _restore(run: dict[str, Any], study: Path) -> None:
    """Write the files of a published run, but for its weights, to its folder in a study's."""
    folder = study / run["row"] / run["column"] / f"seed-{run['seed']}"
    folder.mkdir(parents=True)
    kept = ("recipe", "samples", "device", "versions", "engine", "commit", "note")
    header = {**{name: run.get(name) for name in kept}, "threads": 1}
    (folder / "run.json").write_text(json.dumps(header))
    (folder / "summary.json").write_text(json.dumps(run["summary"]))
    records = [
        {"split": split, **dict(zip(run["fields"], values, strict=True))}
        for split in ("train", "validation")
        for values in run[split]
    ]
    lines = (json.dumps({**record, "update": round(record["update"])}) for record in records)
    (folder / "metrics.jsonl").write_text("\n".join([*lines, ""]))


def pages() -> dict[Path, str]:
    """Return the content of every file that `write` makes."""
    published = {name: rows for name in STUDIES if (rows := read(name))}
    overview = _overview(published["table1"])
    parts, figures = [INTRODUCTION], {}
    for study, rows in published.items():
        title, *_ = (STUDIES[study].__doc__ or "").splitlines()
        parts += [f"## ghostbatch study {study}\n", f"{title}\n"]
        if study == "table1":
            parts += [*overview, "", f"Not run yet: {'; '.join(_not_run(rows))}.\n"]
        parts += _about(study)
        for row, results in rows.items():
            parts += [f"### {NAMES.get(row, row)}\n", *_row(row, results), ""]
            for plot in _plots(results):
                name = row if study == "table1" else file_name(f"{study}-{row}-{plot.name}")
                parts += [*_figure(plot, name, NAMES.get(row, row), figures)]
            parts += _about(study, row)
            notes = {run.header["note"] for group in results.rows[row] for run in group.runs}
            parts += [f"{note}\n" for note in sorted(filter(None, notes))]
        for plot in _measured(study, rows):
            parts += [*_figure(plot, file_name(f"{study}-{plot.name}"), plot.title, figures)]
    before, _, rest = README.read_text().partition(MARKS[0])
    after = rest.partition(MARKS[1])[2]
    readme = "\n".join([before + MARKS[0], "", *overview, "", MARKS[1] + after])
    return {PAGE: "\n".join(parts), README: readme, **figures}


def _about(*names: str) -> list[str]:
    """Return what a reader should know of a study or of one of its rows, if somebody wrote it."""
    about = RESULTS.joinpath(*names, "about.md")
    return [about.read_text()] if about.exists() else []


def _plots(results: Results) -> list[Plot]:
    """Return the figures of a row: one of table 1, none of studies that compare single settings."""
    few: dict[str, tuple[str, ...]] = {"table1": ("error-by-update",)}
    chosen = {**few, "calibration": (), "controls": ()}.get(results.study.name)
    return [p for p in row_figures(results) if chosen is None or p.name in chosen]


def _measured(study: str, rows: dict[str, Results]) -> list[Plot]:
    """Return the figures of a study over all its rows, and of its instruments."""
    together = Results(STUDIES[study](), {row: each.rows[row] for row, each in rows.items()}, {})
    return [*target_figures(together), *instrument_figures(together, RESULTS / study)]


def _figure(plot: Plot, name: str, title: str, figures: dict[Path, str]) -> Iterator[str]:
    """Draw a figure to ``figures``; yield the lines that show it, and the table of its fits."""
    spec = {**plot.spec, "title": {**plot.spec["title"], "subtitle": title}}
    figures[path := FIGURES / f"{name}.svg"] = draw_svg(spec, plot.data)
    yield f"![{title}: {plot.title}](figures/{path.name})\n"
    if plot.fits is not None:
        yield from markdown_lines(plot.fits)
        yield ""


def _row(row: str, results: Results) -> list[str]:
    """Return what a row was run with, and its table."""
    runs = [run for group in results.rows[row] for run in group.runs]
    machines = {f"{r.header['device']}, torch {r.header['versions']['torch']}" for r in runs}
    recipe = runs[0].plan.recipe
    regime = recipe.regime
    rates = [f"{regime.lr:g}", *(f"{drop[1]:g} from epoch {drop[0]}" for drop in regime.drops)]
    command = (
        f"ghostbatch study {results.study.name} --rows {quote(row)} --precision {recipe.precision}"
    )
    warm_up = any(group.column.endswith(WARM_UP) for group in results.rows[row])
    origin = (
        f"{'; '.join(sorted(machines))}; {recipe.precision}. The first column has the rate "
        f"{', '.join(rates)}; weight decay {regime.weight_decay:g}; {regime.epochs} epochs at "
        f"batch {recipe.batch}. Command: `{command}`"
    )
    origin += "; columns with a warm-up: `--warmup 5`." if warm_up else "."
    return [origin, "", *markdown_lines(row_table(entries_of(results)[row]))]


def _not_run(rows: dict[str, Results]) -> list[str]:
    """Return what is left of the paper's tables, as text."""
    left = []
    for row, name in NAMES.items():
        done = {group.column for group in rows[row].rows[row]} if row in rows else set()
        columns = [column for column in COLUMNS if column not in done]
        if columns:
            left.append(f"{', '.join(columns)} of {name}" if done else name)
    return [*left, "AlexNet, ImageNet (table 2)"]


def _overview(rows: dict[str, Results]) -> list[str]:
    """Return the table of all rows: the measured accuracies, and below them the paper's."""
    lines = [f"| | {' | '.join(COLUMNS)} |", "|---" * 6 + "|"]
    for row, results in rows.items():
        groups = results.rows[row]
        accuracies = {group.column: [*group.ends("accuracy").values()] for group in groups}
        for end in ("", WARM_UP):
            found = [accuracies.get(f"{column}{end}", []) for column in COLUMNS]
            if any(found[1:]):
                lines.append(f"| **{NAMES[row]}**{end} | {' | '.join(map(_with_seeds, found))} |")
        paper = STUDIES[results.study.name]().rows[row].paper
        lines.append(f"| the paper | {' | '.join(f'{paper[c]:.2f}' for c in COLUMNS)} |")
    return lines


def _with_seeds(accuracies: Sequence[float]) -> str:
    count = len(accuracies)
    return f"{show_spread(accuracies, 2)}, {count} seed{'s' if count > 1 else ''}" if count else "–"


def main() -> None:
    """Run one of the two commands."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("collect", help="copy the finished runs of a study to results/")
    one.add_argument("study", type=Path)
    one.add_argument("--commit", required=True)
    one.add_argument("--note", default="", help="a sentence that the page shows")
    commands.add_parser("write", help="make the page, its figures and the README's table")
    options = parser.parse_args()
    if options.command == "collect":
        paths = collect(options.study, options.commit, options.note)
        print(f"{len(paths)} results written below {RESULTS}")
        return
    FIGURES.mkdir(exist_ok=True)
    for path, text in pages().items():
        path.write_text(text)


if __name__ == "__main__":
    main()
