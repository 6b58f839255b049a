"""Other people's models."""

import sys
from importlib import import_module
from types import ModuleType

import pytest
import torch


@pytest.fixture(scope="session")
def torchvision() -> ModuleType:
    """torchvision, also where its compiled operators do not load.

    Built for another torch (one with CUDA, say), torchvision leaves its operators undefined and
    then fails as it describes them to PyTorch. No classification model uses them, so it is enough
    that the two schemas it describes first exist.
    """
    try:
        torchvision = import_module("torchvision")
    except RuntimeError as error:
        if "torchvision::nms does not exist" not in str(error):
            raise
        schemas = torch.library.Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms"):
            schemas.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        for name in [n for n in sys.modules if n.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        torchvision = import_module("torchvision")
        torchvision.schemas = schemas  # they last as long as the library object
    return torchvision


@pytest.fixture(scope="session")
def timm(torchvision: ModuleType) -> ModuleType:
    """timm, which needs torchvision."""
    del torchvision
    return pytest.importorskip("timm")
