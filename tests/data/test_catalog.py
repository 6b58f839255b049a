"""Data sets by name: which are accepted, which sizes need no files, which are refused."""

import pytest

from ghostbatch.data import DATASETS, find_dataset, find_info, load
from ghostbatch.data.catalog import INFO
from ghostbatch.errors import InputError


def test_every_named_data_set_has_a_docstring_and_declared_sizes():
    assert INFO.keys() == DATASETS.keys()
    for name, loader in DATASETS.items():
        assert loader.__doc__
        info = find_info(name)
        for size in (info.samples, info.test_samples):
            assert f"{size:,}" in loader.__doc__


@pytest.mark.parametrize("name", [*DATASETS, "folder:some/where", "synthetic:3x32x32"])
def test_a_data_set_is_found_without_its_files(name):
    assert callable(find_dataset(name))


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("letters", "choose one of digits"),
        ("cifar-10", "did you mean cifar10?"),
        ("folder:", "folder:PATH"),
    ],
    ids=["unknown", "misspelt", "folder without a path"],
)
def test_an_unknown_data_set_is_refused_with_a_list_of_the_known_ones(name, hint):
    for look_up in (find_dataset, find_info, load):
        with pytest.raises(InputError, match=rf"^data: '{name}' is unknown; ") as raised:
            look_up(name)
        assert raised.value.field == "data"
        assert hint in raised.value.remedy
        assert all(known in raised.value.remedy for known in (*DATASETS, "folder:PATH"))
