"""Every example in a docstring of the package gives the result that it shows."""

import doctest
import pkgutil
from importlib import import_module

import pytest

import ghostbatch
from ghostbatch.errors import InputError

MODULES = sorted(m.name for m in pkgutil.walk_packages(ghostbatch.__path__, "ghostbatch."))


@pytest.mark.parametrize("name", ["ghostbatch", *MODULES])
def test_the_examples_of_a_module_pass(name):
    try:
        module = import_module(name)
    except InputError as error:
        pytest.skip(str(error))  # an integration without its library
    assert doctest.testmod(module).failed == 0


def test_the_examples_are_found():
    found = doctest.DocTestFinder().find(import_module("ghostbatch.optim.regime"))
    assert sum(len(test.examples) for test in found) >= 4
    assert "ghostbatch.ops.reference" in MODULES
