"""The declared studies have the rows and columns of the paper."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from torch import nn

from ghostbatch.data import find_info
from ghostbatch.errors import InputError
from ghostbatch.nn import to_ghost
from ghostbatch.study import RECIPES, STUDIES, Row, Study, find_recipe, find_study
from ghostbatch.study.studies import quick


def test_less_than_a_thousandth_of_the_initial_statistics_is_left_in_every_column():
    for cell in find_study("quick").cells(seeds=[0]):
        layer = to_ghost(nn.BatchNorm1d(1), 1) if cell.recipe.ghost else nn.BatchNorm1d(1)
        assert (1 - layer.momentum) ** (cell.plan.updates * cell.plan.ghosts) < 1e-3, cell.name


def test_the_longest_cells_come_first():
    cells = find_study("quick").cells()
    assert len(cells) == 15
    assert [cell.column for cell in cells[:3]] == ["+RA"] * 3
    assert [cell.recipe.seed for cell in cells[:3]] == [0, 1, 2]


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


def test_the_cells_of_a_study_are_planned_without_the_held_out_images():
    recipe = replace(find_recipe("f1-digits"), holdout=1000)
    (cell,) = Study("mine", {"row": Row({"SB": recipe})}, seeds=(0,)).cells()
    assert (cell.plan.samples, cell.plan.updates) == (3000, 844)


def test_the_size_of_a_data_set_is_looked_up_once_for_all_cells(monkeypatch):
    """A folder of images is listed for that."""
    asked = []

    def count(name, image_size, holdout):
        asked.append(name)
        return find_info(name, image_size, holdout)

    monkeypatch.setattr("ghostbatch.study.declare.find_info", count)
    assert len(find_study("quick").cells(seeds=range(10))) == 50
    assert asked == ["digits"]


def test_the_quick_study_expects_what_the_readme_says():
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    two = r"([\d.]+) ± [\d.]+"
    rows = re.findall(rf"^\| (SB|LB|\+\w+): .*\| {two} \| {two} \|$", readme, re.MULTILINE)
    assert len(rows) == 5
    expected = ", ".join(f"{column} {accuracy}" for column, accuracy, _ in rows)
    assert f"Expected: {expected} %" in quick.__doc__
    (minutes,) = re.findall(r"(\d+:\d\d) minutes on two cores", readme)
    assert f"Cost: {minutes} minutes on two cores" in quick.__doc__
