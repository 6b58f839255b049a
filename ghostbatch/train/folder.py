"""The folder of one run: its recipe, its checkpoints and its summary."""

import warnings
from pathlib import Path
from typing import Any

import torch

from ghostbatch.data import Data, fingerprint_of
from ghostbatch.errors import InputError
from ghostbatch.files import (
    DamagedError,
    atomic_file,
    check_regular,
    holds,
    read_regular,
    remove_leftovers,
    to_checked_json,
)
from ghostbatch.recipe import Plan
from ghostbatch.train.checkpoint import Checkpoints
from ghostbatch.train.header import (
    RUN,
    Header,
    check_data,
    make_header,
    parse_header,
    warn_of_rounding,
)
from ghostbatch.train.record import (
    Summary,
    name_lines,
    parse_records,
    parse_summary,
    write_summary,
)
from ghostbatch.train.state import norm_backend


class RunFolder:
    """Reads and writes the files of a run; refuses a folder of another recipe.

    ``lock`` is the descriptor that holds the folder's lock: with it, nothing is written once the
    folder or its lock file has been removed, because another run may have started there.
    """

    def __init__(self, path: Path, plan: Plan, lock: int | None = None) -> None:
        self.path, self.plan, self.recipe = path, plan, plan.recipe
        self.metrics = path / "metrics.jsonl"
        self._run, self._summary = path / RUN, path / "summary.json"
        self._lock = lock
        self.checkpoints = Checkpoints(path, self.recipe)
        if path.exists() and not path.is_dir():
            raise InputError("out", f"{path} is a file", "choose another folder")
        if (path / "study.json").exists():
            raise InputError("out", f"{path} holds a study", "choose another folder")
        checkpoints = (self.checkpoints.newest, self.checkpoints.previous)
        check_regular(self._run, self._summary, self.metrics, *checkpoints)
        self._damage: str | None = None
        """Why run.json must be written again, if it must."""
        self.checkpoints.header = self.header = self._read_header()
        """The content of run.json; empty for a new run."""
        if self.header and (fields := self.recipe.differences(self.header["recipe"])):
            raise InputError(
                "out",
                f"{path} belongs to another recipe (other {', '.join(fields)})",
                "choose another folder or delete it",
            )

    def _read_header(self) -> Header:
        """Return the content of run.json; if that is damaged, the checkpoint's copy of it."""
        try:
            if self._run.exists():
                return parse_header(self._run)
            if not (self.metrics.exists() or self.checkpoints.exist()):
                return {}
            self._damage = "is missing"
        except DamagedError as damage:
            self._damage = str(damage)
        try:
            with warnings.catch_warnings(action="ignore"):  # `checkpoint` will warn
                saved = self.checkpoints.load() or {}
        except InputError:
            saved = {}
        if not saved.get("header"):
            problem = f"{self._run} {self._damage}, and no checkpoint of this recipe holds a copy"
            raise InputError("out", problem, "choose another folder")
        return dict(saved["header"])

    def check_lock(self) -> None:
        """Refuse to write if another run may own the folder by now."""
        if self._lock is not None and not holds(self.path, self._lock):
            raise InputError(
                "out",
                f"{self.path} or its lock file was removed while this run was using it",
                "it has stopped, because another run may write there; run the command again",
            )

    def repair(self) -> None:
        """Remove what killed runs left, and rebuild a damaged run.json."""
        names = (RUN, self._summary.name, self.checkpoints.newest.name)
        remove_leftovers(self.path, owned=names)
        if self._damage is not None:
            self._write_header()
            warnings.warn(
                f"{self._run} {self._damage}; it was rebuilt from the checkpoint", stacklevel=2
            )
            self._damage = None

    def check_unchanged(self, device: torch.device, data: Data, micro: int) -> None:
        """Refuse to continue a run whose data has changed; warn if it would round differently."""
        if self.header:
            check_data(self.header, fingerprint_of(data))
        if self.header and self.checkpoints.exist():
            warn_of_rounding(self.header, norm_backend(self.recipe, device), micro)

    def begin(self, device: torch.device, threads: int, data: Data, **how: int | str) -> int:
        """Write ``run.json`` of a new run; return the thread count that the run started with.

        ``how`` is what else it says: micro-batch, evaluations and what they measure, which a
        repetition needs, and the engine.
        """
        if not self.header:
            backend = norm_backend(self.recipe, device)
            fingerprint = fingerprint_of(data)
            self.header = make_header(self.plan, device, backend, threads, fingerprint, **how)
            self.checkpoints.header = self.header
            self._write_header()
        return int(self.header["threads"])

    def _write_header(self) -> None:
        self.check_lock()
        with atomic_file(self._run) as file:
            file.write(to_checked_json(self.header, indent=2))

    def checkpoint(self) -> dict[str, Any] | None:
        """Return the newest intact checkpoint whose records are there.

        Damaged records are only warned of, because no update depends on them.
        """
        content = read_regular(self.metrics) if self.metrics.exists() else b""
        saved = self.checkpoints.load(records=len(content))
        if saved is None:
            return None
        if damaged := parse_records(content[: saved["metrics"]])[1]:
            lines = name_lines(self.metrics, damaged)
            warnings.warn(
                f"{lines}; the run continues, because its numbers do not depend on it", stacklevel=2
            )
        return saved

    def begun(self) -> bool:
        """Return whether the folder has a checkpoint or a summary."""
        return self.checkpoints.exist() or self._summary.exists()

    def summary(self) -> Summary | None:
        """Return the summary, or None if the run has not ended or its summary is damaged.

        The run then continues from its last checkpoint, evaluates and writes the summary again.
        """
        try:
            return parse_summary(self._summary)
        except DamagedError as damage:
            warnings.warn(
                f"{self._summary} {damage}; it is written again from the last checkpoint",
                stacklevel=2,
            )
            return None

    def save(self, state: dict[str, Any], metrics: int) -> None:
        """Write a checkpoint of a state, when metrics.jsonl has ``metrics`` bytes."""
        self.check_lock()
        self.checkpoints.save(state, metrics)

    def end(self, summary: Summary) -> Summary:
        """Write the summary and return it; its presence means that the run has ended."""
        self.check_lock()
        write_summary(self._summary, summary)
        return summary
