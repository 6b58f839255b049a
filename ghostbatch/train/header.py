"""``run.json``: the recipe of a run, and what it ran with, to be compared when it is resumed."""

import platform
import subprocess
import warnings
from pathlib import Path
from typing import Any

import torch

import ghostbatch
from ghostbatch.data import Fingerprint
from ghostbatch.errors import InputError
from ghostbatch.files import DamagedError, read_checked_json
from ghostbatch.recipe import Plan, Recipe

RUN = "run.json"
Header = dict[str, Any]


def make_header(
    plan: Plan,
    device: torch.device,
    backend: str,
    threads: int,
    data: Fingerprint,
    **how: int | str,
) -> Header:
    """Return the content of ``run.json`` for a new run; ``how`` is added to it."""
    processor = f"{device.type} ({platform.machine()})"
    if device.type == "cuda":
        processor = torch.cuda.get_device_name(device)
    return {
        "recipe": plan.recipe.as_dict(),
        "samples": plan.samples,
        "versions": {
            "ghostbatch": ghostbatch.__version__,
            "torch": str(torch.__version__),  # a subclass of str, which no checkpoint may hold
            "python": platform.python_version(),
        },
        "device": processor,
        "backend": backend,
        "threads": threads,
        **how,
        "data": data.as_dict(),
        "commit": _commit(),
    }


def read_header(folder: Path) -> Header:
    """Return the ``run.json`` of a run folder; refuse a damaged one."""
    try:
        return parse_header(folder / RUN)
    except (DamagedError, FileNotFoundError) as damage:
        what = damage if isinstance(damage, DamagedError) else "is missing"
        raise InputError(
            "out",
            f"{folder / RUN} {what}",
            "run its command again, which rebuilds it from a checkpoint, or choose another folder",
        ) from None


def parse_header(path: Path) -> Header:
    """Return the content of a ``run.json``; raise `DamagedError` if it cannot be used."""
    header = read_checked_json(path)
    try:
        int(header["threads"]), int(header["samples"]), header["device"]
        Recipe.from_dict(header["recipe"])
    except (ValueError, TypeError, KeyError, AttributeError):
        raise DamagedError("was not written by this version of ghostbatch") from None
    return header


def check_data(header: Header, data: Fingerprint) -> None:
    """Refuse other data than the run began with; a header of an earlier version has no record."""
    if "data" in header and (change := data.changes_since(header["data"])):
        raise InputError(
            "data", change, "restore the data, or choose another folder for a run with the new data"
        )


def warn_of_rounding(header: Header, backend: str, micro: int) -> None:
    """Warn if a run continues with something that rounds differently."""
    before = {"torch": header.get("versions", {}).get("torch")}
    before |= {name: header.get(name) for name in ("backend", "micro")}
    now = {"torch": str(torch.__version__), "backend": backend, "micro": micro}
    if changed := [name for name in now if before[name] not in (None, now[name])]:
        was, is_now = (
            " and ".join(f"{name} {those[name]}" for name in changed) for those in (before, now)
        )
        warnings.warn(
            f"this run began with {was} and continues with {is_now}, which rounds differently",
            stacklevel=2,
        )


def _commit() -> str | None:
    """Return the commit of the checkout that this package runs from, if it does."""
    here = Path(__file__)
    try:
        for arguments in (["ls-files", "--error-unmatch", here.name], ["rev-parse", "HEAD"]):
            git = subprocess.run(
                ["git", "-C", str(here.parent), *arguments],
                capture_output=True,
                text=True,
                check=True,
            )
    except (OSError, subprocess.CalledProcessError):
        return None
    return git.stdout.strip()
