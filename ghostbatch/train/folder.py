"""The folder of one run: its recipe, its checkpoints and its summary."""

import json
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

import ghostbatch
from ghostbatch.errors import InputError
from ghostbatch.files import atomic_file
from ghostbatch.recipe import Plan, Recipe
from ghostbatch.train.checkpoint import Checkpoints
from ghostbatch.train.record import Summary, read_summary, to_json


class RunFolder:
    """Reads and writes the files of a run; refuses a folder of another recipe."""

    def __init__(self, path: Path, plan: Plan) -> None:
        self.path = path
        self.samples = plan.samples
        self.recipe = plan.recipe
        self.metrics = path / "metrics.jsonl"
        self._run, self._summary = (path / name for name in ("run.json", "summary.json"))
        self.checkpoints = Checkpoints(path, self.recipe)
        if path.exists() and not path.is_dir():
            raise InputError("out", f"{path} is a file", "choose another folder")
        header = self.header()
        if not header and (self.metrics.exists() or self.checkpoints.exist()):
            problem = f"{path} has metrics or checkpoints but no run.json"
            raise InputError("out", problem, "choose another folder")
        if header and (fields := self.recipe.differences(header["recipe"])):
            raise InputError(
                "out",
                f"{path} belongs to another recipe ({', '.join(fields)} differ)",
                "choose another folder or delete it",
            )

    def header(self) -> dict[str, Any]:
        """Return what `begin` wrote; empty for a new run."""
        return read_header(self.path) if self._run.exists() else {}

    def begin(self, device: torch.device, threads: int, **how: int) -> int:
        """Write ``run.json`` of a new run; return the thread count that the run started with.

        ``how`` are other numbers that a repetition needs: its micro-batch and its evaluations.
        """
        header = self.header()
        if not header:
            processor = f"{device.type} ({platform.machine()})"
            if device.type == "cuda":
                processor = torch.cuda.get_device_name(device)
            header = {
                "recipe": self.recipe.as_dict(),
                "samples": self.samples,
                "versions": {
                    "ghostbatch": ghostbatch.__version__,
                    "torch": torch.__version__,
                    "python": platform.python_version(),
                },
                "device": processor,
                "threads": threads,
                **how,
                "commit": _commit(),
            }
            with atomic_file(self._run) as file:
                file.write(json.dumps(header, indent=2).encode() + b"\n")
        return int(header["threads"])

    def checkpoint(self) -> dict[str, Any] | None:
        """Return the newest intact checkpoint; refuse if records before it are missing."""
        saved = self.checkpoints.load()
        held = self.metrics.stat().st_size if self.metrics.exists() else 0
        if saved is not None and held < saved["metrics"]:
            raise InputError(
                "out",
                f"{self.metrics} is shorter than when the checkpoint was taken",
                "delete the folder to start this run again",
            )
        return saved

    def begun(self) -> bool:
        """Return whether the folder has a checkpoint or a summary."""
        return self.checkpoints.exist() or self._summary.exists()

    def summary(self) -> Summary | None:
        """Return the summary, or None if the run has not ended."""
        return read_summary(self._summary)

    def end(self, summary: Summary) -> Summary:
        """Write the summary and return it; its presence means that the run has ended."""
        with atomic_file(self._summary) as file:
            file.write(to_json(summary).encode() + b"\n")
        return summary


def read_header(folder: Path) -> dict[str, Any]:
    """Return the ``run.json`` of a run folder."""
    path = folder / "run.json"
    try:
        header = json.loads(path.read_text())
        int(header["threads"]), int(header["samples"]), header["device"]
        Recipe.from_dict(header["recipe"])
    except (ValueError, TypeError, KeyError):
        problem = f"{path} was not written by this version of ghostbatch"
        raise InputError("out", problem, "choose another folder") from None
    return dict(header)


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
