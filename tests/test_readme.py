"""Every command and code block of the README and the docs runs, and shows what they say."""

import csv
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from unittest.mock import MagicMock, call

import pytest

from ghostbatch import cli, optional
from ghostbatch.errors import InputError

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PAGES = {path.name: path.read_text() for path in (ROOT / "README.md", *ROOT.glob("docs/*.md"))}
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
COMMANDS = [
    line.split("#")[0].strip()
    for block in re.findall(r"```sh\n(.*?)```", README, re.DOTALL)
    for line in block.splitlines()
]
ENVIRONMENT = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}


def run(command, folder):
    return subprocess.run(
        shlex.split(command),
        cwd=folder,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout


def test_the_readme_has_the_blocks_that_these_tests_use():
    assert len(PYTHON) >= 6
    assert COMMANDS[:2] == ["make demo", "make test"]
    assert all(re.match(r"make|ghostbatch", command) for command in COMMANDS)


@pytest.mark.parametrize("code", PYTHON)
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


@pytest.mark.parametrize(
    ("target", "command"),
    [("demo", ".venv/bin/ghostbatch study quick"), ("test", ".venv/bin/python -m pytest -n 2")],
)
def test_a_make_target_runs_its_command(target, command):
    assert run(f"make --no-print-directory -n {target}", ROOT).splitlines()[-1] == command


def test_commands_run_one_after_the_other(tmp_path, monkeypatch, capsys):
    """The study has two columns and one seed here; the test below runs all of it."""
    monkeypatch.chdir(tmp_path)
    for command in COMMANDS:
        if command == "ghostbatch study quick":
            out = run(f"{command} --columns SB,LB --seeds 0", tmp_path)
            assert "report: runs/quick/report.html" in out
        elif command.startswith("ghostbatch"):
            cli.run(shlex.split(command)[1:])  # in this process, which has imported torch
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
