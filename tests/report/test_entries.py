"""Gaps, their intervals, and the marks of cells that are not what they seem."""

import json
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from scipy import stats

from ghostbatch import train
from ghostbatch.report.entries import entries_of, paired_gap
from ghostbatch.report.exports import EXPORTS
from ghostbatch.report.runs import Group, Results
from ghostbatch.study import Row, Study, find_recipe
from ghostbatch.train import Summary


def test_the_interval_of_a_gap_is_that_of_a_paired_t_test():
    draw = np.random.default_rng(0)
    ours, base = (dict(enumerate(draw.normal(90, 1, 5).tolist())) for _ in range(2))
    gap = paired_gap({**ours, 7: 1.0}, {**base, 8: 2.0})
    expected = stats.ttest_rel([*ours.values()], [*base.values()]).confidence_interval()
    assert gap.interval == pytest.approx((expected.low, expected.high))
    assert gap.pairs == 5


def test_a_single_pair_has_no_interval_and_no_pair_no_gap():
    assert paired_gap({0: 2.0, 1: 5.0}, {0: 1.0}).interval is None
    assert paired_gap({0: 2.0}, {1: 1.0}) is None


def summary(accuracy, status="finished", **more):
    fields = {"updates": 10, "epochs": 1.0, "distance": 2.0, "seconds": 3.0, "loss": 0.5}
    return Summary(status=status, accuracy=accuracy, **fields, **more)


def run(recipe, seed, ended):
    status = ended.status if ended else "not finished"
    header = {"device": "cpu", "threads": 1, "versions": {"torch": "2"}, "commit": "abc"}
    plan = replace(recipe, seed=seed).plan(4000)
    return SimpleNamespace(
        **{"plan": plan, "seed": seed, "summary": ended, "status": status},
        **{"header": header, "date": "2026-01-01"},
    )


@pytest.fixture
def results():
    """SB of two seeds; LB of one, diverged once; +LR not begun."""
    small = find_recipe("f1-digits")
    groups = [
        Group("SB", [run(small, 0, summary(90.0)), run(small, 1, summary(91.0))]),
        Group("LB", [run(small, 0, summary(85.0)), run(small, 1, summary(10.0, "diverged"))]),
    ]
    columns = {"SB": small, "LB": small, "+LR": replace(small, holdout=1000)}
    row = Row(columns, paper={"SB": 92.0, "+LR": 88.0})
    study = Study("tiny", {"a_row": row}, (0, 1), scale=0.1)
    return Results(study, {"a_row": groups}, {}, {("a_row", "+LR"): [0, 1]})


def test_marks_say_what_is_missing_diverged_single_scaled_or_held_out(results):
    sb, lb, lr = entries_of(results)["a_row"]
    scaled = "scaled: epochs × 0.1"
    assert sb.marks == (scaled,)
    assert lb.marks == ("1 diverged", "single seed", scaled)
    assert lr.marks == ("missing: seed 0, 1", scaled, "on 1,000 held-out training images")
    assert (sb.difference, lr.difference) == (-1.5, None)
    assert sb.gap is None
    assert (lb.gap.mean, lb.gap.interval) == (-5.0, None)


def test_recalibrated_accuracy_is_a_column_where_runs_have_it(results):
    assert "recalibrated" not in EXPORTS["markdown"](results)
    first = results.rows["a_row"][0].runs[0]
    first.summary = summary(90.0, recalibrated_accuracy=93.25)
    assert "| recalibrated % |" in EXPORTS["markdown"](results)
    assert "| 93.25 |" in EXPORTS["markdown"](results)


def test_markdown_has_a_line_per_column(results):
    title, _, header, rule, *lines = EXPORTS["markdown"](results).splitlines()
    assert title == r"### a\_row"
    assert header.count("|") == rule.count("|") == lines[0].count("|")
    assert [line.split(" | ")[:3] for line in lines] == [
        ["| SB", "90.50 ± 0.71", "2"],
        ["| LB", "85.00", "1"],
        ["| +LR", "–", "0"],
    ]


def test_latex_is_the_papers_table_with_its_marks_as_notes(results):
    text = EXPORTS["latex"](results)
    for line in (
        r"\begin{tabular}{lrrr}",
        r" & SB & LB & +LR \\",
        r"a\_row & $90.50 \pm 0.71^{1}$ & $85.00^{2,3,1}$ & $\mbox{--}^{4,1,5}$ \\",
        r"the paper & 92.00 &  & 88.00 \\",
        r"\multicolumn{4}{l}{\footnotesize $^{1}$ scaled: epochs $\times$ 0.1} \\",
    ):
        assert line in text.splitlines()
    assert text.count("{") == text.count("}")


def test_csv_has_a_line_per_run(results):
    header, *lines = EXPORTS["csv"](results).splitlines()
    names = "row,column,seed,status,accuracy,recalibrated_accuracy,ema_accuracy,loss"
    assert header.startswith(names)
    assert [line.split(",")[:5] for line in lines] == [
        ["a_row", "SB", "0", "finished", "90.0"],
        ["a_row", "SB", "1", "finished", "91.0"],
        ["a_row", "LB", "0", "finished", "85.0"],
        ["a_row", "LB", "1", "diverged", "10.0"],
    ]


def test_csv_has_the_versions_of_every_run(results):
    results.rows["a_row"][0].runs[1].header["versions"]["triton"] = "3"
    header, *lines = EXPORTS["csv"](results).splitlines()
    assert header.endswith(",torch,triton")
    assert [line.split(",")[-2:] for line in lines][:2] == [["2", ""], ["2", "3"]]


def test_json_has_numbers_of_every_column(results):
    found = json.loads(EXPORTS["json"](results))
    assert (found["study"], found["scale"]) == ("tiny", 0.1)
    columns = found["rows"]["a_row"]
    assert columns["SB"]["accuracy"] == 90.5
    assert columns["LB"]["gap"] == {"mean": -5.0, "interval": None, "pairs": 1}
    assert columns["+LR"]["accuracy"] is None
    assert [each["status"] for each in columns["LB"]["runs"]] == ["finished", "diverged"]


def test_averaged_weights_have_a_gap_to_the_first_columns_own_weights(results):
    assert "EMA" not in EXPORTS["markdown"](results)
    sb, lb = (group.runs[0] for group in results.rows["a_row"])
    sb.summary, lb.summary = summary(90.0, ema_accuracy=91.5), summary(85.0, ema_accuracy=89.0)
    first, second, _ = entries_of(results)["a_row"]
    assert (first.averaged, first.averaged_gap) == ({0: 91.5}, None)
    assert (second.averaged, second.averaged_gap.mean) == ({0: 89.0}, -1.0)
    assert "| EMA % | EMA, gap to SB |" in EXPORTS["markdown"](results)


def test_without_altair_a_report_prints_its_tables_and_says_what_to_install(tmp_path, tiny):
    train(tiny, out=tmp_path / "run")
    blocked = "import sys; sys.modules['altair'] = None; from ghostbatch.cli import main; main()"
    words = [sys.executable, "-c", blocked, "report", str(tmp_path / "run")]
    shown = subprocess.run(words, capture_output=True, text=True, check=False)
    assert shown.returncode == 2
    assert "accuracy %" in shown.stdout
    assert shown.stderr.startswith("ghostbatch: report: altair is not installed; run pip install")
    words.append("--csv")
    shown = subprocess.run(words, capture_output=True, text=True, check=True)
    assert shown.stdout.startswith("row,column,seed,status,accuracy")
    assert shown.stderr == ""
