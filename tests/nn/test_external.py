"""Networks of torchvision, timm and users by name: built to size, or refused in one line."""

import builtins
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from ghostbatch import optional
from ghostbatch.errors import InputError
from ghostbatch.nn import external, find_model


@pytest.fixture
def users_modules(monkeypatch):
    """Make the modules in tests/nn/users_modules importable."""
    monkeypatch.syspath_prepend(Path(__file__).with_name("users_modules"))
    yield
    for name in ("homemade", "bundle", "bundle.nets", "broken"):
        sys.modules.pop(name, None)


def refused(name, **arguments):
    with pytest.raises(InputError) as raised:
        find_model(name)(**arguments)
    assert "\n" not in str(raised.value)
    return raised.value


# ------------------------------------------------------------------------------------ torchvision


@pytest.mark.parametrize(
    ("name", "size"), [("resnet18", 32), ("vit_b_32", 64), ("googlenet", 64), ("alexnet", 64)]
)
def test_a_torchvision_name_builds_that_model_to_size(torchvision, name, size):
    del torchvision
    with torch.device("meta"):
        model = find_model(f"torchvision:{name}")(7, in_channels=3, image_size=size)
        assert model(torch.zeros(2, 3, size, size)).shape == (2, 7)


def test_torchvision_models_take_colour_images_only(torchvision):
    del torchvision
    error = refused("torchvision:resnet18", in_channels=1)
    assert str(error).startswith("model: torchvision:resnet18 takes images of 3 channels, not 1; ")


def test_images_that_a_torchvision_transformer_cannot_cut_into_patches_are_refused(torchvision):
    del torchvision
    error = refused("torchvision:vit_b_16", image_size=28)
    assert str(error).startswith("model: torchvision:vit_b_16 takes no images of 28 pixels (")


@pytest.mark.parametrize("name", ["resnet19", "maskrcnn_resnet50_fpn", "nothing_like_it", ""])
def test_an_unknown_torchvision_name_is_refused_when_it_is_looked_up(torchvision, name):
    del torchvision
    with pytest.raises(InputError, match=rf"^model: 'torchvision:{name}' is unknown; ") as raised:
        find_model(f"torchvision:{name}")
    assert ("torchvision:resnet18" in str(raised.value)) == (name == "resnet19")


# ------------------------------------------------------------------------------------------- timm


@pytest.mark.parametrize(
    ("name", "size"), [("resnet26", 32), ("test_vit", 64), ("resnet18.a1_in1k", 32)]
)
def test_a_timm_name_builds_that_model_to_size(timm, name, size):
    del timm
    model = find_model(f"timm:{name}")(7, in_channels=1, image_size=size)
    assert model.eval()(torch.zeros(2, 1, size, size)).shape == (2, 7)


def test_an_unknown_timm_name_is_refused_when_it_is_looked_up(timm):
    del timm
    error = refused("timm:resnet27")
    assert str(error).startswith("model: 'timm:resnet27' is unknown; did you mean timm:resnet")
    error = refused("timm:resnet18.a1_in2k")
    assert str(error).startswith("model: 'timm:resnet18.a1_in2k' is unknown; did you mean")
    assert "timm:resnet18.a1_in1k" in str(error)


# ----------------------------------------------------------------------------------------- python


@pytest.mark.usefixtures("users_modules")
def test_a_function_is_called_with_the_arguments_that_it_takes():
    model = find_model("python:homemade:picky")(7, in_channels=2, image_size=4)
    assert model(torch.zeros(3, 2, 4, 4)).shape == (3, 7)
    find_model("python:homemade:greedy")(7, in_channels=2, image_size=4)
    asked = sys.modules["homemade"].asked
    assert asked == {"num_classes": 7, "in_channels": 2, "image_size": 4}
    assert isinstance(find_model("python:bundle.nets:net")(7), nn.Identity)


@pytest.mark.usefixtures("users_modules")
@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("homemade", "names no function"),
        ("homemade:", "names no function"),
        ("home-made:picky", "names no function"),
        ("homemade:picki", "has no function picki; did you mean picky?"),
        ("homemade:constant", "has no function constant"),
        ("nowhere:picky", "there is no module nowhere; check the name, or add"),
        ("bundle.missing:net", "there is no module bundle.missing;"),
        ("homemade:careless", "returned a str"),
        ("homemade:demanding", "called with nothing (missing a required argument: 'width'); give"),
    ],
)
def test_a_function_that_cannot_be_used_is_refused(path, problem):
    error = refused(f"python:{path}")
    assert error.field == "model"
    assert problem in str(error)


@pytest.mark.usefixtures("users_modules")
def test_a_module_that_cannot_be_imported_shows_its_own_error():
    with pytest.raises(ModuleNotFoundError, match="a_module_that_is_not_there"):
        find_model("python:broken:net")()


@pytest.mark.usefixtures("users_modules")
def test_a_function_is_not_imported_before_its_network_is_built():
    find_model("python:homemade:picky")
    assert "homemade" not in sys.modules


# -------------------------------------------------------------------------------- missing libraries


@pytest.mark.parametrize(
    ("library", "name"), [("torchvision", "torchvision:resnet18"), ("timm", "timm:resnet26")]
)
def test_a_missing_library_is_named_with_how_to_get_it_when_a_network_is_built(
    monkeypatch, library, name
):
    monkeypatch.setattr(external, "find_spec", lambda _: None)
    builder = find_model(name)  # as a report does, where nothing is built

    def import_module(wanted):
        if wanted == library:
            raise ModuleNotFoundError(name=library)
        return builtins

    monkeypatch.setattr(optional, "import_module", import_module)
    with pytest.raises(InputError, match=rf"^{library}: .*; run pip install {library}$"):
        builder()


def test_our_own_networks_import_no_other_library():
    script = Path(__file__).with_name("make_recipes.py")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
