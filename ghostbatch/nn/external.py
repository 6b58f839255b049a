"""Networks from elsewhere by name: ``torchvision:NAME``, ``timm:NAME``, ``python:MODULE:FUNCTION``.

Libraries are imported only when such a name is looked up. A name is checked at once if its library
is installed. A missing library is reported, and a user's function imported, only when the network
is built, so that a recipe can be read where its network cannot be built.
"""

import inspect
import re
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from torch import nn

from ghostbatch.errors import InputError
from ghostbatch.optional import import_timm, import_torchvision

Builder = Callable[..., nn.Module]
"""Takes ``num_classes``, ``in_channels`` and ``image_size``; returns the network."""


def from_torchvision(name: str) -> Builder:
    """Return the builder of a torchvision classifier."""
    if find_spec("torchvision") is not None:
        models = import_torchvision().models
        _check_known("torchvision", name, models.list_models(module=models))

    def build(num_classes: int = 1000, *, in_channels: int = 3, image_size: int = 224) -> nn.Module:
        models = import_torchvision().models
        if in_channels != 3:
            problem = f"torchvision:{name} takes images of 3 channels, not {in_channels}"
            remedy = f"use timm:{name} if timm has it, or your own model"
            raise InputError("model", problem, remedy)
        options: dict[str, Any] = {}
        if name in ("googlenet", "inception_v3"):  # one result in training; no warning of defaults
            options = {"aux_logits": False, "init_weights": True}
        elif name.startswith("vit_"):  # the only ones whose weights depend on the size
            options = {"image_size": image_size}
        options |= {"weights": None, "num_classes": num_classes}
        try:
            return models.get_model(name, **options)  # type: ignore[no-any-return]
        except AssertionError as error:  # the patches of a transformer do not divide them
            problem = f"torchvision:{name} takes no images of {image_size} pixels ({error})"
            raise InputError("model", problem, "use another size, or another model") from None

    return build


def from_timm(name: str) -> Builder:
    """Return the builder of a timm network."""
    if find_spec("timm") is not None:
        timm = import_timm()
        if not timm.is_model(name):
            _check_known("timm", name, timm.list_models())
        try:
            timm.get_pretrained_cfg(name)
        except RuntimeError:  # the network has no weights of that tag
            _check_known("timm", name, timm.list_pretrained(f"{name.partition('.')[0]}.*"))

    def build(num_classes: int = 1000, *, in_channels: int = 3, image_size: int = 224) -> nn.Module:
        timm = import_timm()
        options: dict[str, Any] = {"num_classes": num_classes, "in_chans": in_channels}
        if timm.get_pretrained_cfg(name).fixed_input_size:
            options["img_size"] = image_size
        model: nn.Module = timm.create_model(name, pretrained=False, **options)
        return model

    return build


def from_python(path: str) -> Builder:
    """Return a builder that calls ``MODULE:FUNCTION`` with those of our arguments that it takes."""
    if not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*", path):
        problem = f"'python:{path}' names no function"
        raise InputError("model", problem, "write python:package.module:function")

    def build(num_classes: int = 10, *, in_channels: int = 3, image_size: int = 32) -> nn.Module:
        ours = {"num_classes": num_classes, "in_channels": in_channels, "image_size": image_size}
        function = _import_function(path)
        accepted = _accepted(function, ours)
        try:
            inspect.signature(function).bind(**accepted)
        except TypeError as error:
            problem = f"python:{path} cannot be called with {', '.join(accepted) or 'nothing'}"
            remedy = "give its other arguments defaults"
            raise InputError("model", f"{problem} ({error})", remedy) from None
        model = function(**accepted)
        if not isinstance(model, nn.Module):
            problem = f"python:{path} returned a {type(model).__name__}"
            raise InputError("model", problem, "let it return a torch.nn.Module")
        return model

    return build


FAMILIES: dict[str, Callable[[str], Builder]] = {
    "torchvision": from_torchvision,
    "timm": from_timm,
    "python": from_python,
}


def _check_known(family: str, name: str, known: Iterable[str]) -> None:
    names = list(known)
    if name in names:
        return
    remedy = f"see the list_models of {family}"
    if close := get_close_matches(name, names, n=3):
        remedy = "did you mean " + " or ".join(f"{family}:{each}" for each in close) + "?"
    raise InputError("model", f"'{family}:{name}' is unknown", remedy)


def _import_function(path: str) -> Callable[..., Any]:
    module_name, _, function_name = path.partition(":")
    try:
        module = import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module exists; something that it imports does not
        problem = f"python:{path}: there is no module {error.name}"
        remedy = "check the name, or add the module's folder to PYTHONPATH"
        raise InputError("model", problem, remedy) from None
    function = getattr(module, function_name, None)
    if not callable(function):
        problem = f"python:{path}: {module_name} has no function {function_name}"
        close = get_close_matches(function_name, vars(module), n=1)
        raise InputError(
            "model", problem, f"did you mean {close[0]}?" if close else "check the name"
        )
    return function  # type: ignore[no-any-return]


def _accepted(function: Callable[..., Any], arguments: dict[str, int]) -> dict[str, int]:
    parameters = inspect.signature(function).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return arguments
    takes = {
        n for n, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    }
    return {name: value for name, value in arguments.items() if name in takes}
