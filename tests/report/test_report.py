"""A report shows what a folder of runs holds, and needs nothing else."""

import json
import os
import re
from dataclasses import replace
from functools import partial
from html.parser import HTMLParser
from math import cos, log
from pathlib import Path
from statistics import mean, stdev

import pytest
from rich.console import Console

from ghostbatch import Recipe, Regime, train
from ghostbatch.errors import InputError
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
    """Collects the cells of tables and everything that a browser would fetch."""

    def __init__(self, text):
        super().__init__()
        self.rows, self.fetched, self._cell = [], [], False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        if tag == "tr":
            self.rows.append([])
        self._cell = tag in ("td", "th")
        self.fetched += [
            v for k, v in attrs if k in ("src", "href") and v and not v.startswith("#")
        ]
        self.fetched += [tag] * (tag in ("script", "link", "iframe"))

    def handle_data(self, data):
        if self._cell and data.strip():
            self.rows[-1].append(data.strip())


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
        spreads.append(f"{mean(values):.1f} ± {stdev(values):.1f}")
    assert rows["SB"][1:8] == [*spreads, "2", "32", "plain", "16", "0.128"]
    assert rows["+GBN"][3:6] == ["1", "32", "2"]  # one seed has no deviation


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
    assert note in page.read_text()


def test_without_study_json_every_run_is_a_single_run_under_the_name_of_its_folder(folder):
    (folder / "study.json").rename(folder / "aside")
    results = read_results(folder)
    (folder / "aside").rename(folder / "study.json")
    names = [group.column for group in results.rows["f1-digits"]]
    assert names[:2] == ["mini/f1-digits/+GBN/seed-0", "mini/f1-digits/+GBN/seed-1"]
    assert len(names) == 5
    assert results.study.rows == {}


@pytest.fixture
def declared(folder):
    """Write another study.json into the folder for one test."""
    before = (folder / "study.json").read_bytes()
    yield partial(declare, folder)
    (folder / "study.json").write_bytes(before)


def test_study_json_decides_rows_columns_seeds_and_their_order(folder, declared):
    declared(["+GBN", "LB", "SB"], seeds=(0,))
    _, (table,) = write_report(folder)
    assert [(line[0], line[3]) for line in table.lines] == [("+GBN", "1"), ("SB", "1")]
    assert table.notes == [RECALIBRATED]


def test_study_json_decides_the_figures_and_notes(folder, declared):
    figures = ("accuracy-by-distance",)
    declared(["SB"], seeds=(0, 1), figures=figures, note="A note on the row.")
    text = write_report(folder)[0].read_text()
    assert text.count("<svg") == 1
    assert "Test accuracy at the end against the distance" in text
    assert text.count("A note on the row.") == 1
    assert (folder / "figures" / "accuracy-by-distance.svg").exists()


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
    assert not re.search(r"url\((?!#)", text)
    assert "@import" not in text


def test_the_page_suits_phones_and_dark_mode(folder):
    text = write_report(folder)[0].read_text()
    assert 'name="viewport"' in text
    assert "prefers-color-scheme: dark" in text
    assert text.count("<svg") == 3
    assert "currentColor" in text
    assert "#010203" not in text


def test_figures_lie_beside_the_page_as_svg_and_png(folder):
    write_report(folder)
    for name in ("error-by-update", "error-by-epoch", "distance"):
        assert (folder / "figures" / f"{name}.svg").read_text().lstrip().startswith("<?xml")
        assert (folder / "figures" / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_the_distance_caption_gives_the_slope_of_its_fit(folder):
    text = write_report(folder)[0].read_text()
    finding = "(ultra-slow|ordinary|undecided|neither log t nor sqrt t): .*?"
    errors = (r"± \d+\.\d+", r"\(one seed\)")
    fits = [rf"b = \d+\.\d+ {e}, p = \d+\.\d+ {e}, {finding}" for e in errors]
    assert re.search(rf"updates from 1 to 11, .*SB: {fits[0]}; \+GBN: {fits[1]}\.", text)


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


def test_figures_of_a_long_run_stay_small(tmp_path):
    make_run(tmp_path / "long", updates=20_000)
    page, _ = write_report(tmp_path / "long")
    assert page.stat().st_size < 600_000
    assert "b = 1.30 (one seed)" in page.read_text()


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
    assert page.read_text().count("<svg") == 1
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
    print_tables([Table("row", [], [note])], Console())
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
