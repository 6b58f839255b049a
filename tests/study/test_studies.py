"""The declared studies have the rows and columns of the paper."""

import re
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path

import pytest

from ghostbatch import Recipe
from ghostbatch.data import find_info
from ghostbatch.errors import InputError
from ghostbatch.study import RECIPES, STUDIES, find_recipe, find_study
from ghostbatch.study.studies import quick


def changed(before, after):
    names = (field.name for field in fields(Recipe))
    return {n: getattr(after, n) for n in names if getattr(before, n) != getattr(after, n)}


def test_each_column_is_the_one_before_plus_one_change():
    cells = {cell.column: cell.recipe for cell in find_study("quick").cells(seeds=[0])}
    sb, lb, lr, gbn, ra = (cells[name] for name in ("SB", "LB", "+LR", "+GBN", "+RA"))
    assert sb == find_recipe("f1-digits")
    assert changed(sb, lb) == {"batch": 1024}
    assert changed(lb, lr) == {"lr_rule": "sqrt"}
    assert changed(lr, gbn) == {"ghost": 32}
    assert changed(gbn, ra) == {"hold": "updates"}


def test_ra_has_the_updates_of_sb_and_the_others_its_epochs():
    plans = {cell.column: cell.plan for cell in find_study("quick").cells(seeds=[0])}
    assert plans["+RA"].updates == plans["SB"].updates == 500
    assert plans["+RA"].drop_updates == plans["SB"].drop_updates == (250, 375)
    for column in ("LB", "+LR", "+GBN"):
        assert plans[column].updates == 16
        assert plans[column].seen.epochs == plans["SB"].seen.epochs == 4


def test_the_longest_cells_come_first():
    cells = find_study("quick").cells()
    assert len(cells) == 15
    assert [cell.column for cell in cells[:3]] == ["+RA"] * 3
    assert [cell.recipe.seed for cell in cells[:3]] == [0, 1, 2]


def test_a_study_can_be_limited_to_some_columns_and_seeds():
    cells = find_study("quick").cells(["SB", "+LR"], [7])
    assert {(cell.column, cell.recipe.seed) for cell in cells} == {("SB", 7), ("+LR", 7)}


@pytest.mark.parametrize("name", RECIPES)
def test_every_named_recipe_has_a_plan_and_a_docstring_with_its_command(name):
    find_recipe(name).plan(4000)
    assert f"ghostbatch train {name}" in (RECIPES[name].__doc__ or "")


@pytest.mark.parametrize("name", STUDIES)
def test_every_study_has_a_docstring_with_its_command_expected_results_and_cost(name):
    documentation = STUDIES[name].__doc__ or ""
    assert f"Command: ``ghostbatch study {name}``." in documentation
    assert "Expected: " in documentation
    assert "Cost: " in documentation


def test_unknown_names_are_refused_with_those_that_exist():
    with pytest.raises(InputError, match=r"^study: 'slow' is unknown; choose one of quick"):
        find_study("slow")
    with pytest.raises(InputError, match=r"^recipe: 'f9' is unknown; choose one of f1-digits"):
        find_recipe("f9")
    with pytest.raises(InputError, match=r"^columns: '\+XX' is unknown; choose one of SB, LB"):
        find_study("quick").cells(["SB", "+XX"])


@pytest.mark.parametrize("name", STUDIES)
def test_every_cell_has_another_folder_three_levels_down(name, tmp_path):
    cells = find_study(name).cells(out=tmp_path)
    folders = {cell.folder(tmp_path) for cell in cells}
    assert len(folders) == len(cells)
    assert all(len(folder.relative_to(tmp_path).parts) == 3 for folder in folders)


def test_the_diffusion_study_changes_one_thing_per_row():
    rows = find_study("diffusion").rows
    for size, recipe in rows["before"].columns.items():
        after = rows["after"].columns[size]
        assert replace(after, lr_rule="none", ghost=None) == recipe
        assert (after.lr_rule, after.ghost) == ("sqrt", min(32, recipe.batch))
    for size, recipe in rows["no weight decay"].columns.items():
        assert recipe.regime.weight_decay == 0
        decayed = rows["before"].columns[size]
        assert replace(recipe, regime=decayed.regime) == decayed
    rate, noise = rows["rate or noise"].columns.values()
    assert replace(noise, noise=False, lr_rule="sqrt") == rate


def test_longer_runs_have_longer_first_phases_and_the_same_later_phases():
    longer = find_study("diffusion").rows["longer"]
    plans = [recipe.plan(4000) for recipe in longer.columns.values()]
    firsts = [plan.drop_updates[0] for plan in plans]
    assert firsts == [63, 125, 250, 500, 1000]
    for plan in plans:
        drops = (*plan.drop_updates, plan.updates)
        tail = [b - a for a, b in pairwise(drops)]
        assert tail == pytest.approx([125, 125], abs=1)


def test_the_column_that_another_one_follows_is_run_with_it(tmp_path):
    cells = find_study("diffusion").cells(["by distance"], [0], tmp_path)
    assert [(cell.row, cell.column) for cell in cells] == [
        ("by distance", "SB"),
        ("by distance", "by distance"),
    ]


def test_the_size_of_a_data_set_is_looked_up_once_for_all_cells(monkeypatch):
    """A folder of images is listed for that."""
    asked = []

    def count(name, image_size):
        asked.append(name)
        return find_info(name, image_size)

    monkeypatch.setattr("ghostbatch.study.studies.find_info", count)
    assert len(find_study("quick").cells(seeds=range(10))) == 50
    assert asked == ["digits"]


def test_the_quick_study_expects_what_the_readme_says():
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    rows = re.findall(r"^\| (SB|LB|\+\w+): .* ([\d.]+) ± [\d.]+ \|$", readme, re.MULTILINE)
    assert len(rows) == 5
    expected = ", ".join(f"{column} {accuracy}" for column, accuracy in rows)
    assert f"Expected: {expected} %" in quick.__doc__
    (minutes,) = re.findall(r"(\d+:\d\d) minutes on two cores", readme)
    assert f"Cost: {minutes} minutes on two cores" in quick.__doc__
