"""Selectors: a study with fewer epochs, on other data, or evaluated on held-out images."""

import re
from dataclasses import replace

import pytest

from ghostbatch.errors import InputError
from ghostbatch.optim import update_at
from ghostbatch.study import STUDIES, find_study, read_study
from ghostbatch.study.manifest import held_part, write_study
from ghostbatch.study.select import check_networks, held_out, on_data, scaled
from ghostbatch.study.studies import columns


def recipes(study):
    """Return every recipe of a study's rows by row and column."""
    return {
        (name, column): recipe
        for name, row in study.rows.items()
        for column, recipe in row.columns.items()
    }


@pytest.mark.parametrize("name", STUDIES)
def test_a_scale_multiplies_every_time_of_every_column_and_nothing_else(name):
    whole = find_study(name)
    tenth = scaled(whole, 0.1)
    assert tenth.scale == 0.1
    assert recipes(tenth).keys() == recipes(whole).keys()
    for place, recipe in recipes(tenth).items():
        before = recipes(whole)[place]
        assert replace(recipe, regime=before.regime) == before
        times, ten_times = (
            [regime.epochs, regime.warmup, *(drop[0] for drop in regime.drops)]
            for regime in (before.regime, recipe.regime)
        )
        for time, scaled_time in zip(times, ten_times, strict=True):
            assert update_at(scaled_time, 10**7, 1) == update_at(time, 10**6, 1)
        assert [drop[1:] for drop in recipe.regime.drops] == [d[1:] for d in before.regime.drops]


def test_a_tenth_of_the_epochs_is_a_tenth_of_the_work():
    whole, tenth = (
        sum(cell.images for cell in study.cells(seeds=[0]))
        for study in (find_study("table1"), scaled(find_study("table1"), 0.1))
    )
    assert tenth / whole == pytest.approx(0.1, rel=1e-3)


@pytest.mark.parametrize("scale", [0, -1, float("nan"), float("inf")])
def test_a_scale_that_is_no_factor_is_refused(scale):
    with pytest.raises(InputError, match=r"^scale: .* is not above 0; use 0.1"):
        scaled(find_study("quick"), scale)


def test_a_scale_that_leaves_no_update_is_refused_by_the_cell():
    line = (
        r"^regime.epochs: resnet44-cifar10 LB: 0.002 are less than one update; use more epochs, or"
    )
    with pytest.raises(InputError, match=line):
        scaled(find_study("table1"), 1e-5).cells(["LB"], rows=["resnet44-cifar10"])


def test_other_data_replace_those_of_every_row_and_the_papers_figures():
    study = on_data(find_study("table1"), "synthetic:3x32x32x10:5000")
    assert {recipe.data for recipe in recipes(study).values()} == {"synthetic:3x32x32x10:5000"}
    assert all(row.paper == {} for row in study.rows.values())
    assert [name.partition("-synthetic")[0] for name in study.rows] == [
        *("f1", "c1", "resnet44", "vgg", "c3", "wresnet16-4"),
    ]
    assert "resnet44-synthetic-3x32x32x10-5000" in study.rows
    instruments = on_data(find_study("figure-b"), "cifar100").instruments
    assert [each.recipe.data for each in instruments] == ["cifar100"]
    assert list(on_data(find_study("figure2"), "cifar100").rows) == list(find_study("figure2").rows)


@pytest.mark.parametrize(
    ("study", "data", "row"),
    [("table1", "mnist", "vgg-mnist"), ("table2", "cifar10", "LB 4096")],
)
def test_data_that_a_network_cannot_take_are_refused_by_the_row(study, data, row):
    cells = on_data(find_study(study), data).cells(rows=[row], seeds=[0])
    with pytest.raises(
        InputError, match=rf"^data: {data} does not fit the row {row}: .* too small"
    ):
        check_networks(cells)


@pytest.mark.parametrize("name", STUDIES)
def test_the_own_data_of_every_study_fit(name):
    check_networks(find_study(name).cells(seeds=[0]))


def test_unknown_data_are_refused():
    with pytest.raises(InputError, match=r"^data: 'letters' is unknown"):
        on_data(find_study("quick"), "letters")


def test_held_out_images_are_a_field_of_every_recipe():
    study = held_out(find_study("table1"), 5000)
    assert {recipe.holdout for recipe in recipes(study).values()} == {5000}


SELECTIONS = {
    "runs at scale 1, not 0.5": lambda study: scaled(study, 0.5),
    "f1-digits SB, which this study does not have": lambda study: on_data(study, "mnist"),
    "f1-digits +GBN of another recipe (other ghost)": lambda _: columns("f1-digits", 512, 16),
    "f1-digits SB of another recipe (other holdout)": lambda s: held_out(s, 500),
}
"""What the folder is found to hold, and the selection for which that is refused."""


@pytest.mark.parametrize("found", SELECTIONS)
def test_different_selections_do_not_mix_in_one_folder(found, tmp_path):
    """Even if they select different columns."""
    study = columns("f1-digits", 512, 32)
    write_study(held_part(study, study.cells(["SB", "+GBN"], [0]), None), tmp_path)
    other = SELECTIONS[found](study)
    with pytest.raises(InputError, match=f"^out: the folder holds {re.escape(found)}; choose"):
        held_part(other, other.cells(["LB"], [0]), read_study(tmp_path))
    more = held_part(study, study.cells(["LB"], [1]), read_study(tmp_path))
    assert more.seeds == (0, 1)
    assert list(more.rows["f1-digits"].columns) == ["SB", "LB", "+GBN"]


def test_a_scaled_study_is_read_back_with_its_scale_and_the_papers_figures(tmp_path):
    study = scaled(find_study("table1"), 0.1)
    manifest = held_part(study, study.cells(seeds=[0]), None)
    write_study(manifest, tmp_path)
    assert read_study(tmp_path) == manifest
    assert read_study(tmp_path).scale == 0.1
    assert read_study(tmp_path).rows["c1-cifar10"].paper["+GBN"] == 86.4
