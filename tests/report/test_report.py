"""A report shows what a folder of runs holds, and needs nothing else."""

import csv
import io
import json
import os
from collections import Counter
from dataclasses import replace
from functools import partial
from html.parser import HTMLParser
from math import cos, log
from pathlib import Path
from statistics import mean, stdev

import pytest
from finished_runs import write_study_folder
from rich.console import Console

from ghostbatch import Recipe, Regime, train
from ghostbatch.errors import InputError
from ghostbatch.report.curves import curves_of
from ghostbatch.report.entries import entries_of
from ghostbatch.report.figures import (
    KINDS,
    ON_REQUEST,
    _distance_chart,
    _error_chart,
    _zoomed_chart,
    row_figures,
)
from ghostbatch.report.page import write_report
from ghostbatch.report.runs import read_results
from ghostbatch.report.table import RECALIBRATED, Table
from ghostbatch.report.terminal import print_tables
from ghostbatch.study import Row, Study, find_recipe, find_study
from ghostbatch.study.manifest import write_study


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A study in miniature: two columns, two seeds, one cell unfinished and one diverged."""
    out = tmp_path_factory.mktemp("runs") / "mini"
    regime = Regime(lr=0.05, epochs=0.128, drops=((0.096, 0.005),))
    small = Recipe(model="f1", data="digits", batch=32, base_batch=32, regime=regime)
    for column, recipe in {"+GBN": replace(small, ghost=16), "SB": small}.items():
        for seed in (0, 1):
            train(replace(recipe, seed=seed), out=out / "f1-digits" / column / f"seed-{seed}")
    (out / "f1-digits" / "+GBN" / "seed-1" / "summary.json").unlink()
    lost = out / "f1-digits" / "SB" / "seed-2"
    train(replace(small, seed=2), out=lost)
    summary = json.loads((lost / "summary.json").read_text())
    del summary["checksum"]
    (lost / "summary.json").write_text(json.dumps({**summary, "status": "diverged", "loss": None}))
    declare(out, ["SB", "+GBN"], seeds=(0, 1, 2))
    return out


def declare(folder, columns, seeds, **fields):
    """Write a study.json with one row."""
    row = Row(dict.fromkeys(columns, find_recipe("f1-digits")), **fields)
    write_study(Study("mini", {"f1-digits": row}, seeds), folder)


def make_run(folder, seed=0, updates=20):
    """Write the files of a finished run that moves as 1.3 ln t, with a record of each update."""
    folder.mkdir(parents=True, exist_ok=True)
    regime = Regime(lr=0.05, epochs=updates * 64 / 4000, drops=())
    recipe = Recipe(model="f1", data="digits", batch=64, base_batch=64, regime=regime, seed=seed)
    header = {"recipe": recipe.as_dict(), "samples": 4000, "device": "cpu", "threads": 1}
    (folder / "run.json").write_text(json.dumps(header))
    rest = {"epoch": 1.0, "loss": 0.5, "accuracy": 90.0, "lr": 0.05}
    lines = [
        {"update": t, "split": split, "distance": 1.3 * log(t) + 0.01 * cos(t * t), **rest}
        for t in range(1, updates + 1)
        for split in ("train", "validation")
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    ended = {"status": "finished", "updates": updates, "epochs": 1.0, "seconds": 1.0}
    numbers = {"accuracy": 90.0, "loss": 0.5, "distance": 1.3 * log(updates)}
    (folder / "summary.json").write_text(json.dumps({**ended, **numbers}))


class Page(HTMLParser):
    """Collects the cells of tables, the JSON of the figures, and what a browser would fetch."""

    def __init__(self, text):
        super().__init__()
        self.rows, self.fetched, self.json, self._in = [], [], "", ""
        self.feed(text)
        self.figures = json.loads(self.json)["figures"] if self.json else []

    def handle_starttag(self, tag, attrs):
        if tag == "tr":
            self.rows.append([])
        self._in = "json" if ("type", "application/json") in attrs else tag
        self.fetched += [v for k, v in attrs if k == "src" or (k == "href" and tag != "a")]
        self.fetched += [tag] * (tag in ("link", "iframe"))

    def handle_endtag(self, _tag):
        self._in = ""

    def handle_data(self, data):
        if self._in in ("td", "th") and data.strip():
            self.rows[-1].append(data.strip())
        if self._in == "json":
            self.json += data


def test_the_table_holds_mean_and_deviation_over_finished_seeds(folder):
    page, _ = write_report(folder)
    rows = {row[0]: row for row in reversed(Page(page.read_text()).rows) if row}  # first table
    summaries = [
        json.loads((folder / "f1-digits" / "SB" / f"seed-{s}" / "summary.json").read_text())
        for s in (0, 1)
    ]
    spreads = []
    for name in ("accuracy", "recalibrated_accuracy"):
        values = [summary[name] for summary in summaries]
        spreads.append(f"{mean(values):.2f} ± {stdev(values):.2f}")
    assert rows["SB"][1:8] == [spreads[0], "2", spreads[1], "32", "plain", "16", "0.128"]
    assert "±" not in rows["+GBN"][1]  # one seed has no deviation


def test_unfinished_and_diverged_runs_are_counted_below_the_table(folder):
    _, (table,) = write_report(folder)
    assert table.notes[:2] == ["SB: 1 of 3 diverged", "+GBN: 1 of 2 not finished"]


def test_runs_without_recalibrated_accuracy_have_a_dash_and_no_note(tmp_path):
    make_run(tmp_path / "old")
    _, (table,) = write_report(tmp_path / "old")
    assert table.lines[0][1:3] == ("90.0", "–")
    assert table.notes == []


def test_accuracies_on_held_out_images_are_marked(tmp_path, tiny):
    train(replace(tiny, holdout=1000), out=tmp_path / "run", evaluations=1)
    page, (table,) = write_report(tmp_path / "run")
    note = "run: accuracy on 1,000 held-out training images, not on the test set"
    assert note in table.notes
    assert "on 1,000 held-out training images" in page.read_text()  # a mark


def test_columns_that_all_have_held_out_images_share_one_note(tmp_path, tiny):
    for column in ("SB", "LB"):
        out = tmp_path / "row" / column / "seed-0"
        train(replace(tiny, holdout=1000), out=out, evaluations=1)
    _, (table,) = write_report(tmp_path)
    notes = [note for note in table.notes if "held-out" in note]
    assert notes == ["all columns: accuracy on 1,000 held-out training images, not on the test set"]


def test_without_study_json_rows_and_columns_are_the_names_of_the_folders(folder):
    declared = read_results(folder)
    (folder / "study.json").rename(folder / "aside")
    found = read_results(folder)
    (folder / "aside").rename(folder / "study.json")
    (row, groups), (_, expected) = *found.rows.items(), *declared.rows.items()
    assert row == "f1-digits"
    for group, same in zip(groups, expected, strict=True):
        assert (group.column, [run.seed for run in group.runs]) == (
            same.column,
            [run.seed for run in same.runs],
        )
    assert (found.study.seeds, found.missing) == ((0, 1, 2), declared.missing)
    gap = entries_of(found)["f1-digits"][1].gap
    assert gap == entries_of(declared)["f1-digits"][1].gap is not None


def test_a_folder_of_other_depth_without_study_json_holds_single_runs(tmp_path):
    for name in ("one", "two/three"):
        make_run(tmp_path / "runs" / name)
    results = read_results(tmp_path / "runs")
    assert [group.column for group in results.rows["f1-digits"]] == ["runs/one", "runs/two/three"]
    assert results.study.rows == {}


@pytest.fixture
def declared(folder):
    """Write another study.json into the folder for one test."""
    before = (folder / "study.json").read_bytes()
    yield partial(declare, folder)
    (folder / "study.json").write_bytes(before)


def test_study_json_decides_rows_columns_seeds_and_their_order(folder, declared):
    declared(["+GBN", "LB", "SB"], seeds=(0,))
    page, (table,) = write_report(folder)
    assert [(line[0], line[3]) for line in table.lines] == [("+GBN", "1"), ("SB", "1")]
    assert table.notes == [RECALIBRATED]
    rows = Page(page.read_text()).rows
    assert rows[rows.index(["LB", "–", "0", *["–"] * 6]) + 1] == ["missing: seed 0"]


def test_study_json_decides_the_figures_and_notes(folder, declared):
    figures = ("accuracy-by-distance",)
    declared(["SB"], seeds=(0, 1), figures=figures, note="A note on the row.")
    text = write_report(folder)[0].read_text()
    assert len(Page(text).figures) == 1
    assert "Accuracy at the end against the distance" in text
    assert text.count("A note on the row.") == 1


def test_accuracy_by_distance_is_refused_for_runs_without_drops(tmp_path, tiny):
    flat = replace(tiny, regime=replace(tiny.regime, drops=()))
    train(flat, out=tmp_path / "f1-digits" / "SB" / "seed-0")
    declare(tmp_path, ["SB"], seeds=(0,), figures=("accuracy-by-distance",))
    with pytest.raises(InputError, match=r"^figures: .* needs a drop of the rate, and SB has none"):
        write_report(tmp_path)


def test_an_unknown_figure_in_study_json_is_refused(folder, declared):
    declared(["SB"], seeds=(0,), figures=("pie",))
    with pytest.raises(InputError, match=r"^figures of row f1-digits: 'pie' is unknown; choose"):
        write_report(folder)


def test_a_study_that_has_not_begun_has_no_report(tmp_path):
    write_study(find_study("quick"), tmp_path)
    with pytest.raises(InputError, match=r"^folder: .* holds no runs; name the folder of a study"):
        write_report(tmp_path)


def test_the_page_fetches_nothing(folder):
    page, _ = write_report(folder)
    text = page.read_text()
    assert Page(text).fetched == []
    style = text[text.index("<style>") : text.index("</style>")]
    assert "url(" not in style
    assert "@import" not in style


def test_figures_are_written_as_svg_and_png_when_asked_for(folder):
    write_report(folder)
    assert not (folder / "figures").exists()
    write_report(folder, figures=True)
    for name in ("error-by-update", "error-by-epoch", "distance"):
        drawing = (folder / "figures" / f"{name}.svg").read_text()
        assert drawing.startswith("<svg")
        assert ">SB<" in drawing  # the legend
        assert 'aria-label="hover' not in drawing
        assert (folder / "figures" / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_the_slope_of_a_fit_is_that_of_the_distances(tmp_path):
    for seed in (0, 1):
        make_run(tmp_path / "f1-digits" / "SB" / f"seed-{seed}", seed=seed, updates=2000)
    declare(tmp_path, ["SB"], seeds=(0, 1), figures=("distance",))
    rows = Page(write_report(tmp_path)[0].read_text()).rows
    fits = rows[rows.index(["slope b", "exponent p", "law"]) + 1]
    assert fits[:2] == ["SB", "1.30 ± 0.00"]
    assert fits[2].startswith("1.0")
    assert fits[3].startswith("ultra-slow: log t fits better than sqrt t")


def test_every_declaration_is_valid_vega_lite(folder, declared, monkeypatch):
    kinds = tuple(kind for kind in KINDS if kind not in ON_REQUEST)  # see test_measured.py
    declared(["SB", "+GBN"], seeds=(0, 1), figures=kinds)
    checked = []

    def check(chart):
        checked.append(chart.to_dict(validate=True))
        return checked[-1]

    monkeypatch.setattr("ghostbatch.report.charts.declared", check)
    for each in (_error_chart, _zoomed_chart, _distance_chart):
        each.cache_clear()
    assert len(row_figures(read_results(folder))) == len(kinds)
    assert len(checked) == len(kinds)
    for each in (_error_chart, _zoomed_chart, _distance_chart):
        each.cache_clear()


def test_text_of_a_run_folder_cannot_leave_its_place_on_the_page(tmp_path):
    evil = "</script><script>alert(1)<" + "script><b>&'x\""
    make_run(tmp_path / "f1-digits" / "SB" / "seed-0")
    make_run(tmp_path / "f1-digits" / evil.replace("/", "") / "seed-0")
    header = json.loads((tmp_path / "f1-digits" / "SB" / "seed-0" / "run.json").read_text())
    header |= {"device": evil, "commit": evil, "versions": {evil: evil}}
    (tmp_path / "f1-digits" / "SB" / "seed-0" / "run.json").write_text(json.dumps(header))
    declare(tmp_path, ["SB", evil.replace("/", "")], seeds=(0,), note=evil)
    text = write_report(tmp_path)[0].read_text()
    assert text.count("<script") == text.count("</script>") == 3
    assert "<b>" not in text.replace("<b>model</b>", "").split('<p class="recipe">')[0]
    assert Page(text).figures[0]["spec"]["params"]


def test_the_thin_curves_of_a_long_run_are_those_of_its_records(tmp_path):
    make_run(tmp_path / "long", updates=20_000)
    (group,) = read_results(tmp_path / "long").rows["f1-digits"]
    data = curves_of([group])
    drawn = list(zip(data["split"], data["update"], data["distance"], strict=True))
    assert 180 < sum(split == "train" for split, *_ in drawn) < 320
    assert max(data["update"]) == 20_000
    for split, t, distance in drawn:
        assert split in ("train", "validation")
        assert distance == pytest.approx(1.3 * log(t) + 0.01 * cos(t * t), rel=1e-4, abs=1e-6)


def test_a_report_reads_each_file_of_a_run_once(tmp_path, monkeypatch):
    write_study_folder(replace(find_study("quick"), seeds=(0, 1)), tmp_path / "study")
    opened = Counter()

    def count(path, *args, whole=io.open, **kwargs):
        opened[str(path)] += 1
        return whole(path, *args, **kwargs)

    monkeypatch.setattr("io.open", count)  # which pathlib calls
    write_report(tmp_path / "study")
    names = ("run.json", "metrics.jsonl", "summary.json")
    files = [str(path) for path in tmp_path.rglob("*.json*") if path.name in names]
    assert len(files) == 30
    assert {opened[path] for path in files} == {1}


def test_each_curve_has_some_markers_at_steps_of_log_time_and_at_equal_steps(tmp_path):
    write_study_folder(replace(find_study("quick"), seeds=(0,)), tmp_path)
    data = curves_of(read_results(tmp_path).rows["f1-digits"])
    for column in ("SB", "LB", "+LR", "+GBN", "+RA"):
        rows = zip(data["column"], data["split"], data["share"], data["marker"], strict=True)
        shares = [(s, m) for each, split, s, m in rows if (each, split) == (column, "validation")]
        assert 6 <= sum(mark & 1 for _, mark in shares) <= 8
        assert 2 <= sum(mark & 2 == 2 for share, mark in shares if share > 200 / 3) <= 5


def test_unfinished_runs_are_curves_of_their_own_beside_the_mean_of_the_others(folder):
    data = curves_of(read_results(folder).rows["f1-digits"])
    runs = dict.fromkeys(zip(data["column"], data["run"], strict=True))
    assert list(runs) == [
        ("SB", "mean of 2 seeds"),
        ("SB", "seed 2, diverged"),
        ("+GBN", "seed 0"),
        ("+GBN", "seed 1, not finished"),
    ]
    banded = [run for run, low in zip(data["run"], data["error_low"], strict=True) if low]
    assert set(banded) == {"mean of 2 seeds"}


def test_the_records_of_the_figures_are_beside_the_page_as_csv(folder):
    write_report(folder)
    lines = list(csv.DictReader((folder / "records.csv").read_text().splitlines()))
    records = (folder / "f1-digits" / "SB" / "seed-0" / "metrics.jsonl").read_text().splitlines()
    own = [each for each in lines if (each["column"], each["seed"]) == ("SB", "0")]
    assert [float(each["distance"]) for each in own] == [json.loads(r)["distance"] for r in records]


def test_making_the_page_again_gives_the_same_page(folder):
    page, _ = write_report(folder)
    first = page.read_bytes()
    assert write_report(folder)[0].read_bytes() == first


def test_a_single_run_has_a_report_too(tmp_path, tiny):
    train(tiny, out=tmp_path / "alone")
    _, (table,) = write_report(tmp_path / "alone")
    assert table.title == f"{tiny.model}-digits"
    assert table.lines[0][0] == "alone"


def test_single_runs_go_by_the_names_of_their_folders(tmp_path, tiny):
    for name, recipe in {"a": tiny, "b": replace(tiny, batch=32)}.items():
        train(recipe, out=tmp_path / "two" / name)
    _, (table,) = write_report(tmp_path / "two")
    assert [(line[0], line[3], line[4]) for line in table.lines] == [
        ("two/a", "1", "64"),
        ("two/b", "1", "32"),
    ]


def test_different_recipes_are_never_averaged(tmp_path, tiny):
    for seed, recipe in enumerate((tiny, replace(tiny, batch=32))):
        train(replace(recipe, seed=seed), out=tmp_path / "f1-digits" / "LB" / f"seed-{seed}")
    declare(tmp_path, ["LB"], seeds=(0, 1))
    with pytest.raises(InputError, match=r"^folder: f1-digits LB holds runs of different recipes"):
        write_report(tmp_path)


def test_a_report_removes_what_killed_ones_left(tmp_path, tiny):
    train(tiny, out=tmp_path)
    (tmp_path / "figures").mkdir()
    left = [tmp_path / "report.html.01234567.partial", tmp_path / "figures" / "1.svg.0.partial"]
    for path in left:
        path.write_text("half")
        os.utime(path, (0, 0))
    write_report(tmp_path)
    assert not [path for path in left if path.exists()]


DAMAGES = {"cut": b'{"up\n', "other bytes": b"\xff\xfe\x00\n", "no object": b"[]\n"}


@pytest.mark.parametrize("name", ["run.json", "summary.json", "metrics.jsonl"])
@pytest.mark.parametrize("content", DAMAGES.values(), ids=DAMAGES)
def test_the_damaged_file_of_a_single_run_is_named(tmp_path, name, content):
    make_run(tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=rf"^folder: no run can be read \(.*{name}"):
        write_report(tmp_path)
    assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize("name", ["run.json", "summary.json", "metrics.jsonl"])
def test_a_run_with_a_damaged_file_is_named_and_the_others_are_reported(tmp_path, name):
    for seed in (0, 1, 2):
        make_run(tmp_path / "f1-digits" / "SB" / f"seed-{seed}", seed=seed)
    declare(tmp_path, ["SB"], seeds=(0, 1, 2))
    (tmp_path / "f1-digits" / "SB" / "seed-1" / name).write_bytes(b"\xff{\n")
    with pytest.warns(UserWarning, match=rf"^f1-digits SB seed 1 is left out: .*{name}") as warned:
        page, (table,) = write_report(tmp_path)
    assert len(warned) == 1
    assert table.lines[0][3] == "2"
    (note,) = table.notes
    assert note.startswith("SB seed 1 cannot be read: ")
    assert name in note
    assert "SB seed 1 cannot be read: " in page.read_text()


@pytest.mark.parametrize("kept", [0, 3])
def test_a_run_that_has_lost_its_last_records_is_named(tmp_path, kept):
    make_run(tmp_path)
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:kept]))
    with pytest.warns(UserWarning, match=r"metrics\.jsonl: records after update .* are missing"):
        write_report(tmp_path)


def test_a_single_run_that_cannot_be_read_is_named_and_the_others_are_reported(tmp_path):
    for name in ("a", "b"):
        make_run(tmp_path / "two" / name)
    (tmp_path / "two" / "b" / "run.json").write_text("{")
    with pytest.warns(UserWarning, match=r"^two/b is left out: .*run\.json"):
        page, (table,) = write_report(tmp_path / "two")
    assert [line[0] for line in table.lines] == ["two/a"]
    assert "two/b cannot be read: " in page.read_text()


def test_a_study_in_which_no_run_can_be_read_is_refused(tmp_path):
    for seed in (0, 1):
        folder = tmp_path / "f1-digits" / "SB" / f"seed-{seed}"
        make_run(folder, seed=seed)
        (folder / "summary.json").write_text("{")
    declare(tmp_path, ["SB"], seeds=(0, 1))
    with pytest.raises(InputError, match=r"^folder: no run can be read \(.*seed-0/summary.json"):
        write_report(tmp_path)


@pytest.mark.parametrize(
    ("part", "seeds"),
    [
        pytest.param("f1-digits", {"SB": "2", "+GBN": "1"}, id="row"),
        pytest.param("f1-digits/SB", {"SB": "2"}, id="column"),
        pytest.param("f1-digits/SB/seed-1", {"SB": "1"}, id="run"),
    ],
)
def test_a_part_of_a_study_is_reported_as_the_study_declares_it(folder, declared, part, seeds):
    declared(["SB", "+GBN"], seeds=(0, 1, 2), figures=("distance",), note="A note on the row.")
    page, (table,) = write_report(folder / part)
    assert table.title == "f1-digits"
    assert {line[0]: line[3] for line in table.lines} == seeds
    assert len(Page(page.read_text()).figures) == 1
    assert page.read_text().count("A note on the row.") == 1


def test_a_report_of_part_of_a_study_can_be_made_from_inside_it(folder, monkeypatch):
    monkeypatch.chdir(folder / "f1-digits")
    _, (table,) = write_report(Path("SB"))
    assert table.lines[0][0] == "SB"


def test_a_run_below_a_study_that_does_not_declare_it_is_a_single_run(tmp_path, tiny):
    declare(tmp_path, ["SB"], seeds=(0,), note="A note on the row.")
    train(tiny, out=tmp_path / "extra")
    page, (table,) = write_report(tmp_path / "extra")
    assert [line[0] for line in table.lines] == ["extra"]
    assert "A note on the row." not in page.read_text()


def test_a_folder_without_runs_is_refused_and_left_empty(tmp_path):
    with pytest.raises(InputError, match=r"^folder: .* holds no runs"):
        write_report(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_note_with_brackets_in_its_path_is_printed_as_it_is(capsys):
    note = "SB seed 1 cannot be read: " + "a long/" * 20 + "[red]/metrics.jsonl is damaged"
    print_tables([Table((), [], notes=[note])], Console())
    assert capsys.readouterr().out.splitlines()[-1] == note


def test_a_run_that_has_lost_its_run_json_is_named(tmp_path):
    for seed in (0, 1):
        make_run(tmp_path / "f1-digits" / "SB" / f"seed-{seed}", seed=seed)
    declare(tmp_path, ["SB"], seeds=(0, 1))
    (tmp_path / "f1-digits" / "SB" / "seed-1" / "run.json").unlink()
    with pytest.warns(
        UserWarning, match=r"^f1-digits SB seed 1 is left out: .*run.json is missing"
    ):
        _, (table,) = write_report(tmp_path)
    assert table.lines[0][3] == "1"
