"""Promises that the package as a whole keeps."""

import pickle
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import ghostbatch
from ghostbatch.errors import InputError

HERE = Path(__file__).parent


def run(*arguments):
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=True)


@cache
def imported_by(*arguments):
    """Return the modules that a Python process imports."""
    lines = run("-X", "importtime", *arguments).stderr.splitlines()
    return {line.rpartition("|")[2].strip() for line in lines}


HEAVY = ["torchvision", "triton", "altair", "vl_convert", "jinja2", "tyro", "rich"]


@pytest.mark.parametrize("library", ["torch", *HEAVY])
def test_importing_the_package_does_not_import(library):
    assert library not in imported_by("-c", "import ghostbatch")


@pytest.mark.parametrize("library", HEAVY)
def test_importing_all_public_names_does_not_import(library):
    assert library not in imported_by("-c", "from ghostbatch import *")


@pytest.mark.parametrize("flag", ["--version", "--help"])
def test_a_flag_that_only_prints_imports_neither_torch_nor_altair(flag):
    imported = imported_by("-m", "ghostbatch", flag)
    assert "ghostbatch.cli" in imported
    assert not imported & {"torch", "numpy", "altair", "tyro", "rich"}


@pytest.mark.parametrize(
    "command", ["list", "plan f1-digits --batch 1024", "train f1-digits --dry-run --device cpu"]
)
def test_a_command_that_draws_nothing_does_not_import_altair(command):
    imported = imported_by("-m", "ghostbatch", *command.split())
    assert "ghostbatch.recipes" in imported
    assert not imported & {"altair", "vl_convert", "jinja2"}


@pytest.mark.parametrize(
    "statements",
    [
        pytest.param("import ghostbatch as gb; train = gb.train", id="attribute"),
        pytest.param("from ghostbatch import train", id="from-import"),
        pytest.param("from ghostbatch import *", id="star-import"),
        pytest.param(
            "import ghostbatch.train; train = ghostbatch.train", id="after-the-subpackage"
        ),
        pytest.param(
            "from ghostbatch.train import Record; from ghostbatch import train",
            id="after-a-name-of-the-subpackage",
        ),
        pytest.param(
            "import ghostbatch as gb; gb.train; import ghostbatch.train; train = gb.train; "
            "from ghostbatch.train import Record",
            id="before-and-after-the-subpackage",
        ),
    ],
)
def test_train_is_the_function_in_whatever_order_it_is_imported(statements):
    shown = run("-W", "error", "-c", f"{statements}; print(train.__qualname__, callable(train))")
    assert shown.stdout == "train True\n"


def test_subpackages_are_attributes_and_dir_lists_the_public_names():
    shown = run("-c", "import ghostbatch as gb; print(*gb.nn.MODELS, gb.optim.Regime, *dir(gb))")
    names = shown.stdout.split()
    assert "resnet44" in names
    assert set(ghostbatch.__all__) <= set(names)


def test_type_checkers_read_the_packages_annotations():
    assert Path(ghostbatch.__file__).with_name("py.typed").is_file()  # as PEP 561 has it


def test_an_unknown_attribute_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'ghostbatch' has no attribute 'to_goats'"):
        ghostbatch.to_goats  # noqa: B018 (the access is the test)


@pytest.mark.parametrize("name", sorted({*ghostbatch.__all__} - {"LOCAL"}))
def test_every_public_name_is_there_and_documented(name):
    documentation = getattr(ghostbatch, name).__doc__
    assert documentation
    assert not documentation.startswith(f"{name}(")  # as Python documents a bare dataclass


def test_the_public_constant_is_there():
    assert ghostbatch.LOCAL == "local"


def test_the_library_works_without_fcntl_and_register_at_fork(tmp_path):
    """As on Windows."""
    shown = run("-W", "error", HERE / "support" / "without_posix.py", tmp_path / "run")
    assert shown.stdout == "finished\n"


def test_an_input_error_survives_being_sent_between_processes():
    error = InputError("batch", "1 is below 2", "use 2 or more")
    assert str(pickle.loads(pickle.dumps(error))) == str(error)  # noqa: S301 (our own)


def test_the_oldest_supported_versions_are_those_that_make_oldest_tests_with():
    project = tomllib.loads((HERE.parent / "pyproject.toml").read_text())["project"]
    requirements = [Requirement(line) for line in project["dependencies"]]
    lines = (HERE.parent / "constraints-oldest.txt").read_text().splitlines()
    tested = dict(line.split("==") for line in lines if not line.startswith("#"))
    for name in ("torch", "torchvision", "numpy"):
        (bounds,) = (r.specifier for r in requirements if r.name == name)
        assert str(bounds) == ">=" + tested[name].removesuffix(".0")


def test_the_oldest_python_of_the_classifiers_is_the_one_that_is_required_and_checked_for():
    pyproject = tomllib.loads((HERE.parent / "pyproject.toml").read_text())
    project = pyproject["project"]
    named = [line.rpartition(" :: ")[2] for line in project["classifiers"] if "Python ::" in line]
    assert project["requires-python"] == f">={named[0]}"
    assert pyproject["tool"]["ruff"]["target-version"] == f"py{named[0].replace('.', '')}"
