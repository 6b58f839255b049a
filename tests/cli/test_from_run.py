"""``evaluate`` and ``export``: from a run to its network on the command line."""

import json
import re
from dataclasses import replace

import pytest
import torch

from ghostbatch import load_run, train
from ghostbatch.cli import evaluate


@pytest.fixture(autouse=True)
def finished(tiny, tmp_path):
    """Finish a short run in the folder "run", beside which commands run."""
    train(tiny, out=tmp_path / "run", device="cpu")


def test_evaluate_prints_the_numbers_of_the_summary_and_that_they_agree(run, tmp_path):
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    code, out, err = run("evaluate", "run", "--device", "cpu")
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        f"python:small_networks:narrow on digits after update 16: loss {summary['loss']:.4f}, "
        f"accuracy {summary['accuracy']:.2f} %",
        "summary.json agrees",
    ]


def test_evaluate_says_what_the_summary_says_if_that_differs(run, tmp_path, monkeypatch):
    network = load_run(tmp_path / "run")
    with torch.no_grad():
        network[-1].bias.add_(torch.arange(10.0))
    read = evaluate.read_run
    monkeypatch.setattr(evaluate, "read_run", lambda path: replace(read(path), model=network))
    code, out, _ = run("evaluate", "run", "--device", "cpu")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert code == 0
    assert out.splitlines()[1] == (
        f"summary.json differs: loss {summary['loss']:.4f}, accuracy {summary['accuracy']:.2f} %"
    )


def test_evaluate_says_that_a_run_has_not_ended(run, tmp_path):
    (tmp_path / "run" / "summary.json").unlink()
    code, out, _ = run("evaluate", "run", "--device", "cpu")
    assert code == 0
    assert out.splitlines()[1] == "the run has not ended: 16 updates are planned"


def test_evaluate_also_shows_recalibrated_statistics(run):
    code, out, _ = run("evaluate", "run", "--device", "cpu", "--recalibrate")
    assert code == 0
    plain, agrees, recalibrated = out.splitlines()
    assert agrees == "summary.json agrees"
    assert recalibrated.startswith("with recalibrated statistics: loss ")
    loss = [float(re.search(r"loss ([\d.]+)", line)[1]) for line in (plain, recalibrated)]
    assert 0 < abs(loss[0] - loss[1]) < 0.5


def test_export_writes_the_file_that_its_ending_names(run, tmp_path):
    code, out, err = run("export", "run", "--to", "network.pt")
    assert (code, err) == (0, "")
    assert out == "network.pt: python:small_networks:narrow after update 16 of 16\n"
    weights = torch.load(tmp_path / "network.pt", weights_only=True)
    for name, tensor in load_run("run").state_dict().items():
        assert weights[name].equal(tensor)
