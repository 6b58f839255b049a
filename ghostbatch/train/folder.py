"""The folder of one run: whose it is, where it stands, how it ended."""

import json
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

import ghostbatch
from ghostbatch.errors import InputError
from ghostbatch.files import atomic_file
from ghostbatch.recipe import Plan
from ghostbatch.train.checkpoint import Checkpoints
from ghostbatch.train.record import Summary, read_summary, to_json


class RunFolder:
    """Reads and writes a run's files; opening one checks that it belongs to the recipe."""

    def __init__(self, path: Path, plan: Plan) -> None:
        self.path = path
        self.samples = plan.samples
        self.recipe = plan.recipe.as_dict()
        self.metrics = path / "metrics.jsonl"
        self._run, self._summary = (path / name for name in ("run.json", "summary.json"))
        self.checkpoints = Checkpoints(path, self.recipe)
        if path.exists() and not path.is_dir():
            raise InputError("out", f"{path} is a file", "choose another folder")
        header = self.header()
        if not header and (self.metrics.exists() or self.checkpoints.exist()):
            raise InputError(
                "out", f"{path} holds files of another program", "choose another folder"
            )
        if header and header["recipe"] != self.recipe:
            theirs = header["recipe"]
            fields = [f for f in self.recipe if self.recipe[f] != theirs.get(f)]
            raise InputError(
                "out",
                f"{path} belongs to another recipe ({', '.join(fields)} differ)",
                "choose another folder or delete it",
            )

    def header(self) -> dict[str, Any]:
        """What `begin` wrote; empty for a new run."""
        return read_header(self.path) if self._run.exists() else {}

    def begin(self, device: torch.device, threads: int) -> int:
        """Describe a new run; return the thread count that this run started with."""
        header = self.header()
        if not header:
            header = {
                "recipe": self.recipe,
                "samples": self.samples,
                "versions": {
                    "ghostbatch": ghostbatch.__version__,
                    "torch": torch.__version__,
                    "python": platform.python_version(),
                },
                "device": _describe(device),
                "threads": threads,
                "commit": _commit(),
            }
            with atomic_file(self._run) as file:
                file.write(json.dumps(header, indent=2).encode() + b"\n")
        return int(header["threads"])

    def checkpoint(self) -> dict[str, Any] | None:
        """The newest checkpoint that is whole; refused if the records before it are not there."""
        saved = self.checkpoints.load()
        held = self.metrics.stat().st_size if self.metrics.exists() else 0
        if saved is not None and held < saved["metrics"]:
            raise InputError(
                "out",
                f"{self.metrics} is shorter than its checkpoint knows",
                "delete the folder to start this run again",
            )
        return saved

    def begun(self) -> bool:
        """Whether there is anything to go on from."""
        return self.checkpoints.exist() or self._summary.exists()

    def summary(self) -> Summary | None:
        """The summary, if the run has ended."""
        return read_summary(self._summary)

    def end(self, summary: Summary) -> None:
        """Write the summary, last of all: its presence means that the run has ended."""
        with atomic_file(self._summary) as file:
            file.write(to_json(summary).encode() + b"\n")


def read_header(folder: Path) -> dict[str, Any]:
    """The ``run.json`` of a run folder."""
    path = folder / "run.json"
    try:
        header = json.loads(path.read_text())
        int(header["threads"]), int(header["samples"]), header["recipe"]["seed"], header["device"]
    except (ValueError, TypeError, KeyError):
        raise InputError("out", f"{path} is not of this program", "choose another folder") from None
    return dict(header)


def _describe(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type} ({platform.machine()})"


def _commit() -> str | None:
    """The commit of this package's own checkout, if it runs from one."""
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
