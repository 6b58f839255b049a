"""Other people's models."""

from types import ModuleType

import pytest

from ghostbatch.optional import import_torchvision


@pytest.fixture(scope="session")
def torchvision() -> ModuleType:
    """torchvision, also where its compiled operators do not load."""
    return import_torchvision()


@pytest.fixture(scope="session")
def timm(torchvision: ModuleType) -> ModuleType:
    """timm, which needs torchvision."""
    del torchvision
    return pytest.importorskip("timm")
