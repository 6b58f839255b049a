"""The tables and figures of the paper, the ablation, and the columns of any recipe."""

import re
from dataclasses import fields, replace
from itertools import pairwise

import pytest

from ghostbatch import Recipe
from ghostbatch.errors import InputError
from ghostbatch.recipe import LATEST
from ghostbatch.report.figures import KINDS
from ghostbatch.study import RECIPES, STUDIES, Study, find_recipe, find_study
from ghostbatch.study.studies import columns

COLUMNS = ("SB", "LB", "+LR", "+GBN", "+RA")
TABLE_1 = {
    "f1-mnist": (98.27, 97.05, 97.55, 97.60, 98.53),
    "c1-cifar10": (87.80, 83.95, 86.15, 86.4, 88.20),
    "resnet44-cifar10": (92.83, 86.10, 89.30, 90.50, 93.07),
    "vgg-cifar10": (92.30, 84.1, 88.6, 91.50, 93.03),
    "c3-cifar100": (61.25, 51.50, 57.38, 57.5, 63.20),
    "wresnet16-4-cifar100": (73.70, 68.15, 69.05, 71.20, 73.57),
}
"""What the paper has, in the order of `COLUMNS`."""


def changed(before, after):
    names = (field.name for field in fields(Recipe))
    return {n: getattr(after, n) for n in names if getattr(before, n) != getattr(after, n)}


def assert_cumulative(row, base, batch, ghost):
    """Each of the five columns is the one before plus one change."""
    sb, lb, lr, gbn, ra = (row.columns[name] for name in COLUMNS)
    assert sb == base
    assert changed(sb, lb) == {"batch": batch}
    assert changed(lb, lr) == {"lr_rule": "sqrt"}
    assert changed(lr, gbn) == {"ghost": ghost}
    assert changed(gbn, ra) == {"hold": "updates"}


def plans(study, row):
    """Return the plan of each column of a row."""
    return {cell.column: cell.plan for cell in study.cells(seeds=[0], rows=[row])}


COLUMNS_OF_F1 = columns("f1-digits", batch=512, ghost=16)


def rows_with(*columns):
    """Return every study and row that has these columns."""
    return [
        (study, name)
        for study in (*map(find_study, STUDIES), COLUMNS_OF_F1)
        for name, row in study.rows.items()
        if set(columns) <= set(row.columns)
    ]


@pytest.mark.parametrize("name", TABLE_1)
def test_table_1_has_the_papers_columns_and_accuracies(name):
    row = find_study("table1").rows[name]
    assert_cumulative(row, find_recipe(name), 4096, 128)
    assert row.paper == dict(zip(COLUMNS, TABLE_1[name], strict=True))
    assert list(row.columns) == list(COLUMNS)


def test_table_1_has_the_papers_rows_and_each_recipe_says_the_same_figures():
    assert list(find_study("table1").rows) == list(TABLE_1)
    for name, accuracies in TABLE_1.items():
        text = " ".join((RECIPES[name].__doc__ or "").split())
        said = re.search(r"The paper: (.*?) %", text)[1]
        found = [float(word) for word in re.findall(r" ([\d.]+)", said)]
        assert tuple(found) == accuracies


@pytest.mark.parametrize(("large", "ghosts"), [(4096, 54.92), (8192, 53.93)])
def test_table_2_runs_lb_and_lr_at_2048_as_the_authors_and_also_at_the_large_batch(large, ghosts):
    row = find_study("table2").rows[f"LB {large}"]
    base = find_recipe("alexnet-imagenet")
    assert_cumulative(row, base, large, 128)
    assert changed(base, row.columns["LB 2048"]) == {"batch": 2048}
    assert changed(base, row.columns["+LR 2048"]) == {"batch": 2048, "lr_rule": "sqrt"}
    theirs = {"SB": 57.10, "LB 2048": 41.23, "+LR 2048": 53.25}
    assert row.paper == {**theirs, "+GBN": ghosts, "+RA": 59.5}
    assert set(find_study("table2").rows) == {"LB 4096", "LB 8192"}


@pytest.mark.parametrize(
    ("study", "ghost"), [(find_study("quick"), 32), (COLUMNS_OF_F1, 16)], ids=["quick", "columns"]
)
def test_the_quick_study_and_that_of_any_recipe_have_the_papers_columns(study, ghost):
    assert_cumulative(study.rows["f1-digits"], find_recipe("f1-digits"), 512, ghost)


@pytest.mark.parametrize(("study", "row"), rows_with("SB", "+RA"), ids=str)
def test_ra_has_the_updates_of_sb_and_the_others_its_epochs(study, row):
    found = plans(study, row)
    assert found["+RA"].updates == found["SB"].updates
    assert found["+RA"].drop_updates == found["SB"].drop_updates
    for column in set(found) - {"SB", "+RA", "by distance"}:
        assert found[column].seen.epochs == found["SB"].seen.epochs


@pytest.mark.parametrize("study", ["figure3", "figure-c1"])
def test_adapted_runs_have_all_three_remedies(study):
    base = find_recipe("resnet44-cifar10")
    (row,) = find_study(study).rows.values()
    adapted = {name: each for name, each in row.columns.items() if name.startswith("adapted")}
    assert adapted
    for recipe in adapted.values():
        remedies = {"lr_rule": "sqrt", "ghost": 128, "hold": "updates"}
        assert changed(base, recipe) == {"batch": recipe.batch, **remedies}
    sizes = {recipe.batch for recipe in adapted.values()}
    assert sizes == ({256, 512, 1024, 2048} if study == "figure3" else {2048})
    if study == "figure-c1":
        assert changed(base, row.columns["unadapted"]) == {"batch": 2048}


def test_a_study_can_be_limited_to_some_rows_columns_and_seeds():
    cells = find_study("table1").cells(["SB", "+LR"], [7], rows=["c1-cifar10", "f1-mnist"])
    assert {cell.name for cell in cells} == {
        f"{row} {column} seed 7" for row in ("f1-mnist", "c1-cifar10") for column in ("SB", "+LR")
    }


@pytest.mark.parametrize("name", STUDIES)
def test_a_cost_in_images_is_that_of_the_cells_of_a_seed(name):
    text = " ".join((STUDIES[name].__doc__ or "").split())
    if (said := re.search(r"Cost: ([\d,]+) million images", text)) is None:
        pytest.skip("its cost is in minutes")
    images = sum(cell.images for cell in find_study(name).cells(seeds=[0]))
    assert int(said[1].replace(",", "")) == round(images / 1e6)


@pytest.mark.parametrize("name", STUDIES)
def test_every_cell_is_planned_without_data_files_and_drawn_by_known_figures(
    name, tmp_path, monkeypatch
):
    monkeypatch.setattr("ghostbatch.data.catalog.DATASETS", {})  # nothing can be loaded
    monkeypatch.chdir(tmp_path)
    study = find_study_without_checks(name, monkeypatch)
    for cell in study.cells(seeds=[0]):
        assert cell.plan.updates >= 1
        assert cell.plan.drop_updates == tuple(sorted(cell.plan.drop_updates))
    for row in study.rows.values():
        assert set(row.figures) <= set(KINDS)
        assert set(row.paper) <= set(row.columns)


def find_study_without_checks(name, monkeypatch):
    """Return a study although no data set is known."""
    monkeypatch.setattr("ghostbatch.recipe.find_dataset", lambda _: None)
    return find_study(name)


@pytest.mark.parametrize("name", STUDIES)
def test_names_of_rows_and_columns_can_be_listed_and_are_folders(name):
    """Lists on the command line are separated by commas."""
    study = find_study(name)
    for label in (*study.rows, *study.columns):
        assert re.fullmatch(r"[\w.+ -]+", label)


def test_unknown_rows_and_columns_of_other_rows_are_refused():
    with pytest.raises(InputError, match=r"^rows: 'f9' is unknown; choose one of f1-mnist, c1"):
        find_study("table1").cells(rows=["f9"])
    with pytest.raises(InputError, match=r"^columns: 'mean' is unknown; choose one of sqrt, "):
        find_study("ablation").cells(["mean"], rows=["rule"])


@pytest.mark.parametrize(
    ("name", "ghost"),
    [("diffusion", 32), ("figure2", 128)],
)
def test_distances_are_compared_before_and_after_and_without_weight_decay(name, ghost):
    rows = find_study(name).rows
    assert rows["before"].columns.keys() == rows["after"].columns.keys()
    for size, recipe in rows["before"].columns.items():
        after = rows["after"].columns[size]
        assert replace(after, lr_rule="none", ghost=None) == recipe
        assert (after.lr_rule, after.ghost) == ("sqrt", min(ghost, recipe.batch))
    for size, recipe in rows["no weight decay"].columns.items():
        decayed = rows["before"].columns[size]
        assert replace(recipe, regime=decayed.regime) == decayed
        assert recipe.regime == replace(decayed.regime, weight_decay=0.0)
        assert recipe.plan(50_000).rates(0).weight_decay == 0


def test_the_first_rows_of_figure_2_are_the_runs_of_figure_1():
    (row,) = find_study("figure1").rows.values()
    assert row.columns == find_study("figure2").rows["before"].columns
    assert [recipe.batch for recipe in row.columns.values()] == [64, 128, 256, 512, 1024, 2048]
    assert "error-by-epoch" in row.figures


def test_figure_c3_ends_at_the_first_drop_and_has_batches_below_the_base_batch():
    (row,) = find_study("figure-c3").rows.values()
    base = find_recipe("resnet44-cifar10")
    sizes = []
    for recipe in row.columns.values():
        ended, whole = (each.plan(50_000) for each in (recipe, replace(base, batch=recipe.batch)))
        assert ended.updates == whole.drop_updates[0]
        assert {ended.rates(update) for update in (0, ended.updates - 1)} == {whole.rates(0)}
        sizes.append(recipe.batch)
    assert sizes == [32, 64, 128, 256, 512, 1024, 2048, 4096]


@pytest.mark.parametrize(("name", "row"), [("diffusion", "rate or noise"), ("figure-c2", None)])
def test_noise_is_compared_with_the_scaled_rate_and_two_controls_of_as_many_updates(name, row):
    study = find_study(name)
    row = row or next(iter(study.rows))
    short, large, rate, noise = study.rows[row].columns.values()
    assert changed(large, rate) == {"lr_rule": "sqrt"}
    assert changed(large, noise) == {"noise": True}
    assert short.batch == short.base_batch == large.base_batch
    assert len({plan.updates for plan in plans(study, row).values()}) == 1
    assert len({plan.drop_updates for plan in plans(study, row).values()}) == 1


def test_figure_b_starts_from_glorot_weights_and_reaches_as_far_as_a_run_does():
    study = find_study("figure-b")
    (instrument,), (row,) = study.instruments, study.rows.values()
    assert instrument.name == "potential"
    assert instrument.recipe == row.columns["SB"]
    assert changed(find_recipe("resnet44-cifar10"), instrument.recipe) == {"init": "glorot"}


@pytest.mark.parametrize(
    ("name", "row", "firsts", "tail"),
    [
        ("diffusion", "longer", [63, 125, 250, 500, 1000], [125, 125]),
        ("longer", "resnet44-cifar10", [7910, 15820, 31641, 63281, 126563], [16015, 16407, 14063]),
    ],
)
def test_longer_runs_have_longer_first_phases_and_the_same_later_phases(name, row, firsts, tail):
    found = plans(find_study(name), row)
    by_length = sorted(found.values(), key=lambda plan: plan.updates)
    assert list(find_study(name).rows[row].columns) == ["x 0.25", "x 0.5", "x 1", "x 2", "x 4"]
    assert [plan.drop_updates[0] for plan in by_length] == firsts
    for plan in by_length:
        drops = (*plan.drop_updates, plan.updates)
        assert [b - a for a, b in pairwise(drops)] == pytest.approx(tail, abs=1)


def test_the_ablation_changes_one_thing_in_each_column():
    rows = find_study("ablation").rows
    reference = rows["ghost norm"].columns
    lb, gbn = reference["LB"], reference["+GBN"]
    assert changed(lb, gbn) == {"lr_rule": "sqrt", "ghost": 128}
    assert (lb.batch, lb.hold, lb.clip) == (4096, "epochs", 5.0)
    warm = replace(gbn.regime, warmup=5)
    expected = {
        ("ghost norm", "GBN without +LR"): {"lr_rule": "none"},
        ("ghost norm", "+LR"): {"ghost": None},
        ("running statistics", "sequential"): {},
        ("running statistics", "mean"): {"running": "mean"},
        ("rule", "sqrt"): {},
        ("rule", "sqrt warm-up"): {"regime": warm},
        ("rule", "linear"): {"lr_rule": "linear"},
        ("rule", "linear warm-up"): {"lr_rule": "linear", "regime": warm},
        ("first updates", "clipping"): {},
        ("first updates", "warm-up"): {"clip": None, "regime": warm},
        ("first updates", "neither"): {"clip": None},
    }
    for (row, column), change in expected.items():
        assert changed(gbn, rows[row].columns[column]) == change, (row, column)
    noises = rows["kind of noise"].columns
    assert [changed(lb, recipe) for recipe in noises.values()] == [
        {},
        {"noise": True},
        {"label_noise": 0.1},
        {"dropconnect": 0.1},
    ]
    sizes = [recipe.ghost for recipe in rows["ghost size"].columns.values()]
    assert sizes == [16, 32, 64, 128, 256, 512, 1024, 2048, 4096]


def test_each_control_changes_one_habit_and_the_last_all_of_them():
    rows, table = find_study("controls").rows, find_study("table1").rows
    habits = {
        "as declared": {},
        "authors pixels": {"normalisation": "authors"},
        "momentum reset": {"reset_momentum": True},
        "augmented": {"augment": True},
        "base batch 256": {"base_batch": 256},
    }
    assert len(rows) == 12
    for name, row in rows.items():
        network, column = name.split(" ")
        declared = table[network].columns[column]
        *single, together = row.columns
        for habit in single:
            assert changed(declared, row.columns[habit]) == habits[habit]
        everything = {field: value for habit in single for field, value in habits[habit].items()}
        assert changed(declared, row.columns[together]) == everything
        assert ("augmented" in row.columns) == (network == "f1-mnist")
        assert ("base batch 256" in row.columns) == (column in ("+LR", "+GBN"))
        assert set(row.paper.values()) == {table[network].paper[column]}


@pytest.mark.parametrize(
    ("name", "row"), [("diffusion", "by distance"), ("ablation", "drop by distance")]
)
def test_the_column_that_another_one_follows_is_run_with_it(name, row, tmp_path):
    cells = find_study(name).cells(["by distance"], [0], tmp_path, [row])
    assert [(cell.row, cell.column) for cell in cells] == [(row, "SB"), (row, "by distance")]
    small, follower = (cell.plan for cell in cells)
    assert follower.recipe.reference == str(cells[0].folder(tmp_path.resolve()))
    assert follower.updates <= LATEST * small.updates


def test_a_seed_that_is_named_twice_is_run_once():
    study = replace(find_study("quick"), seeds=(1, 1))
    assert len(study.cells(["SB"])) == len(study.cells(["SB"], [0, 0])) == 1


@pytest.mark.parametrize("reference", ["by distance", "itself", "else"])
def test_a_column_that_follows_no_run_of_its_own_is_refused(reference):
    """The study would wait for it for ever."""
    row = find_study("diffusion").rows["by distance"]
    itself = replace(row.columns["by distance"], reference=reference)
    study = Study("mine", {"row": replace(row, columns={**row.columns, "itself": itself})})
    with pytest.raises(InputError, match=rf"^reference: '{reference}' is unknown; .*one of SB, "):
        study.cells()


def test_a_cell_that_cannot_be_planned_is_named():
    study = columns("f1-digits", batch=4001, ghost=32)
    line = r"^batch: f1-digits .*: 4001 is above the 4000 training samples of digits; use 4000 or"
    with pytest.raises(InputError, match=line):
        study.cells()
