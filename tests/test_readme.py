"""Every command and code block of the README and the docs runs, and shows what they say."""

import csv
import os
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import MagicMock, call

import pytest
import torch

import ghostbatch as gb
from ghostbatch import cli, optional
from ghostbatch import study as study_package
from ghostbatch.cli import evaluate, export, report, study, train
from ghostbatch.cli.flags import parse
from ghostbatch.data.catalog import INFO
from ghostbatch.errors import InputError
from ghostbatch.ops.backends import select

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
README = (ROOT / "README.md").read_text()
PAGES = {path.name: path.read_text() for path in (ROOT / "README.md", *DOCS.glob("*.md"))}
BLOCKS = {
    f"{name}-{number}": code
    for name, text in PAGES.items()
    for number, code in enumerate(re.findall(r"```python\n(.*?)```", text, re.DOTALL))
}
LOGGERS = {
    library: code
    for library in ("csv", "wandb", "mlflow")
    for code in BLOCKS.values()
    if f"import {library}\n" in code
}
PYTHON = [
    pytest.param(code, id=name) for name, code in BLOCKS.items() if code not in LOGGERS.values()
]
OPTIONAL = {"accelerate", "lightning", "timm", "transformers"}
ENVIRONMENT = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}

SMALLER = {
    "ghostbatch study quick": "--columns SB,LB --seeds 0 --scale 0.2 --out runs/quick",
    "ghostbatch train f1-digits": "--regime.epochs 1 --regime.drops ,",
}
"""Flags that make a command of the README short enough for a test."""

READ = {
    "train": train._read,
    "study": lambda argv: study._cells(*study._read(argv)),
    "report": partial(parse, report.ReportOptions, command="report"),
    "evaluate": partial(parse, evaluate.EvaluateOptions, command="evaluate"),
    "export": partial(parse, export.ExportOptions, command="export"),
}
"""What reads the words of a command without running it."""


def commands(text):
    """Return the command lines of a page's blocks for the shell."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    shell = "".join(block for language, block in blocks if language in ("", "sh"))
    lines = (line.split("#")[0] for line in re.sub(r"\\\n *", "", shell).splitlines())
    return [line.strip() for line in lines if line.strip()]


COMMANDS = commands(README)
OTHERS = {
    re.sub(r"^torchrun .* -m ", "", line)
    for name, text in PAGES.items()
    for line in commands(text)
    if name != "README.md" and re.match(r"ghostbatch |torchrun ", line)
}


def run(command, folder):
    return subprocess.run(
        shlex.split(command),
        cwd=folder,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout


@pytest.fixture
def registries():
    """Take back what a page adds to the registries of the package."""
    kept = [(each, dict(each)) for each in (gb.nn.MODELS, gb.data.DATASETS, INFO)]
    backends = select.BACKENDS
    yield
    select.BACKENDS = backends
    for registry, before in kept:
        registry.clear()
        registry.update(before)


def test_the_pages_have_the_blocks_that_these_tests_use():
    assert len(PYTHON) >= 20
    assert len(OTHERS) >= 20
    assert COMMANDS[:2] == ["make demo", "make test"]
    assert all(re.match(r"make|ghostbatch", command) for command in COMMANDS)


@pytest.mark.parametrize("code", PYTHON)
@pytest.mark.usefixtures("registries")
@pytest.mark.filterwarnings("ignore::FutureWarning")  # Lightning's own
def test_python_blocks_run(code):
    optional.import_torchvision()  # timm's and transformers' own import of it would fail in places
    try:
        exec(compile(code, "README.md", "exec"), {})  # noqa: S102 (our own README)
    except InputError as error:
        if "is not installed" not in str(error):
            raise
        pytest.skip(str(error))  # a block about a library that is optional
    except ModuleNotFoundError as error:
        if error.name not in OPTIONAL:
            raise
        pytest.skip(f"{error.name} is not installed")


def test_the_loggers_of_the_docs_get_every_record(tmp_path, monkeypatch):
    """W&B and MLflow are stand-ins that note what they are given."""
    monkeypatch.chdir(tmp_path)
    for library in ("wandb", "mlflow"):
        monkeypatch.setitem(sys.modules, library, MagicMock())
    for code in LOGGERS.values():
        exec(compile(code, "runs.md", "exec"), {})  # noqa: S102 (our own docs)
    with Path("run.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["split"] for row in rows} == {"train", "validation"}
    expected = [
        call(
            {
                f"{row['split']}/{name}": float(row[name])
                for name in ("loss", "accuracy", "distance")
            },
            step=int(row["update"]),
        )
        for row in rows
    ]
    run = sys.modules["wandb"].init.return_value.__enter__.return_value
    assert run.log.mock_calls == expected
    assert sys.modules["mlflow"].log_metrics.mock_calls == expected


def test_the_page_on_runs_names_everything_in_a_checkpoint(tiny, tmp_path):
    gb.train(replace(tiny, ema=0.9), out=tmp_path)
    saved = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    tables = (DOCS / "runs.md").read_text().partition("## A checkpoint")[2]
    first, second = tables.split("| key in `state` |")
    for keys, table in ((saved, first), (saved["state"], second)):
        named = re.findall(r"^\| (`.*?`) \|", table, re.MULTILINE)
        assert {name for names in named for name in re.findall(r"`(\w+)`", names)} == keys.keys()
    assert f"the number of this layout, {saved['format']};" in first


@pytest.mark.parametrize("command", sorted(OTHERS))
def test_the_commands_of_the_docs_are_understood(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _, name, *words = shlex.split(command)
    if name in READ:
        READ[name](argv=words)
    else:
        cli.run([name, *words])  # it only prints


def test_every_link_leads_to_a_file_and_a_heading_that_exist():
    links = 0
    for name, text in PAGES.items():
        folder = ROOT if name == "README.md" else DOCS
        for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", re.sub(r"`[^`]*`", "", text)):
            links += 1
            path, _, heading = target.partition("#")
            page = folder / path if path else folder / name
            assert page.exists(), f"{name}: {target}"
            if heading:
                headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
                assert heading in map(slug, headings), f"{name}: {target}"
    assert links > 80


def slug(heading):
    """Return the anchor of a heading, as a code host and the site make it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def test_the_reference_has_every_public_name():
    listed = re.findall(r"^::: ghostbatch\.(\S+)$", PAGES["api.md"], re.MULTILINE)
    names = {name.rpartition(".")[2] for name in listed}
    for module in (gb, gb.nn, gb.optim, gb.data, gb.diagnostics, study_package):
        assert {*module.__all__} - {"nn"} <= names, module.__name__


def test_the_reference_has_every_name_that_a_page_imports():
    listed = set(re.findall(r"^::: ghostbatch\.(?:\S+\.)?(\S+)$", PAGES["api.md"], re.MULTILINE))
    pattern = r"^from ghostbatch(?:\.\S+)? import (.+)$"
    lines = [line for code in BLOCKS.values() for line in re.findall(pattern, code, re.MULTILINE)]
    names = {name for line in lines for name in line.split(", ")}
    assert len(names) > 10
    assert names - {"select"} <= listed  # a module


@pytest.mark.parametrize(
    ("target", "command"),
    [("demo", ".venv/bin/ghostbatch study quick"), ("test", ".venv/bin/python -m pytest -n 2")],
)
def test_a_make_target_runs_its_command(target, command):
    assert run(f"make --no-print-directory -n {target}", ROOT).splitlines()[-1] == command


def test_commands_run_one_after_the_other(tmp_path, monkeypatch, capsys):
    """Studies and runs are `SMALLER` here; the test below runs all of the study."""
    monkeypatch.chdir(tmp_path)
    for command in COMMANDS:
        flags = next((more for start, more in SMALLER.items() if command.startswith(start)), "")
        if command == "ghostbatch study quick":
            out = run(f"{command} {flags}", tmp_path)
            assert "report: runs/quick/report.html" in out
        elif command.startswith("ghostbatch"):
            cli.run(shlex.split(f"{command} {flags}")[1:])  # here, where torch is imported
            assert capsys.readouterr().out, command
    assert (tmp_path / "runs" / "quick" / "report.html").exists()


@pytest.mark.slow
def test_the_readmes_table_is_what_the_study_gives(tmp_path):
    """On other hardware than the README's, rounding may change the last digits."""
    out = run("ghostbatch study quick", tmp_path)
    two = r"([\d.]+) ± [\d.]+"
    stated = re.findall(rf"^\| (\S+): .*\| {two} \| {two} \|$", README, re.MULTILINE)
    found = {line[0]: line for line in re.findall(rf"^(\S+) +{two} +{two} ", out, re.MULTILINE)}
    assert [column for column, _, _ in stated] == ["SB", "LB", "+LR", "+GBN", "+RA"]
    for column, *accuracies in stated:
        assert [float(a) for a in found[column][1:]] == pytest.approx(
            [float(a) for a in accuracies], abs=1.0
        )
