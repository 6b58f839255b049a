"""Promises that the package as a whole keeps."""

import pickle
import subprocess
import sys

import pytest

import ghostbatch
from ghostbatch.errors import InputError


def modules_after(statement):
    code = f"import sys; {statement}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "library", ["torchvision", "triton", "matplotlib", "jinja2", "tyro", "rich"]
)
def test_importing_the_library_brings_no(library):
    assert library not in modules_after("import ghostbatch")


def test_every_public_name_is_there_and_documented():
    for name in ghostbatch.__all__:
        assert getattr(ghostbatch, name).__doc__, name


def test_an_input_error_survives_being_sent_between_processes():
    error = InputError("batch", "1 is below 2", "use 2 or more")
    assert str(pickle.loads(pickle.dumps(error))) == str(error)  # noqa: S301 (our own)
