"""Files that other programs read: a state_dict, torch.export's format and ONNX."""

import io
import logging
import warnings
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor, nn

from ghostbatch.errors import InputError
from ghostbatch.files import atomic_file
from ghostbatch.train.load import SavedRun
from ghostbatch.train.state import parameter_dtype

LOGGER = logging.getLogger(__name__)

EXAMPLES = 2
"""Images to export with. One would be taken to mean that there is always one."""


def check_target(to: Path) -> None:
    """Refuse a file of an unknown ending, or in a folder that does not exist."""
    if to.suffix not in WRITERS:
        problem = f"{to} ends in none of {', '.join(WRITERS)}"
        raise InputError("to", problem, "the ending chooses what is written")
    if not to.parent.is_dir():
        raise InputError("to", f"there is no folder {to.parent}", "make it first")


def export_run(run: SavedRun, to: Path) -> None:
    """Write a run's network, with plain norms, in the format that the file's ending names.

    ``.pt`` is its state_dict, ``.pt2`` what torch.export makes of it, ``.onnx`` an ONNX graph. The
    last two take batches of any size.
    """
    check_target(to)
    example = torch.randn(
        (EXAMPLES, *run.info.shape),
        dtype=parameter_dtype(run.recipe),
        generator=torch.Generator().manual_seed(0),
    )
    content = io.BytesIO()
    try:
        with warnings.catch_warnings(action="ignore"):  # the exporters' own
            WRITERS[to.suffix](run.model, example, content)
    except InputError:
        raise
    except Exception as error:  # the exporters raise all kinds
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        problem = f"{run.recipe.model} cannot be exported as {to.suffix} ({reason})"
        raise InputError("to", problem, "export its state_dict as .pt") from error
    with atomic_file(to) as file:
        file.write(content.getbuffer())


def _write_state_dict(model: nn.Module, _example: Tensor, file: IO[bytes]) -> None:
    torch.save(model.state_dict(), file)


def _write_exported(model: nn.Module, example: Tensor, file: IO[bytes]) -> None:
    torch.export.save(torch.export.export(model, (example,), dynamic_shapes=_any_batch()), file)


def _write_onnx(model: nn.Module, example: Tensor, file: IO[bytes]) -> None:
    for library in ("onnx", "onnxscript"):
        if find_spec(library) is None:
            raise InputError("to", f".onnx needs {library}", "run pip install onnx onnxscript")
    program = torch.onnx.export(
        model,
        (example,),
        dynamo=True,
        verbose=False,
        dynamic_shapes=_any_batch(),
        input_names=["images"],
        output_names=["logits"],
    )
    content = program.model_proto.SerializeToString()  # type: ignore[union-attr]
    if find_spec("onnxruntime") is not None:
        _check_onnx(content, model, example)
    else:
        LOGGER.info("onnxruntime is not installed, so the file is not compared with the network")
    file.write(content)


def _check_onnx(content: bytes, model: nn.Module, example: Tensor) -> None:
    """Refuse a graph whose outputs onnxruntime does not compute as the network does."""
    session = import_module("onnxruntime").InferenceSession(
        content, providers=["CPUExecutionProvider"]
    )
    (outputs,) = session.run(None, {"images": example.numpy()})
    with torch.no_grad():
        expected = model(example)
    torch.testing.assert_close(torch.from_numpy(outputs), expected, rtol=1e-3, atol=1e-3)


def _any_batch() -> tuple[Any, ...]:
    return ({0: torch.export.Dim("batch")},)


WRITERS: dict[str, Callable[[nn.Module, Tensor, IO[bytes]], None]] = {
    ".pt": _write_state_dict,
    ".pt2": _write_exported,
    ".onnx": _write_onnx,
}
