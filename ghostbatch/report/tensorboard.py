"""Writes the records of ``metrics.jsonl`` as TensorBoard scalars."""

from pathlib import Path
from typing import Any

from ghostbatch.errors import InputError
from ghostbatch.train import Record, read_records
from ghostbatch.train.record import MEASURED

SCALARS = ("loss", "accuracy", "lr", "distance", "gradient_norm", "clipped", *MEASURED)


class TensorBoard:
    """An ``on_record`` for `train`; writes its files to ``folder/tensorboard``.

    A resumed run writes all of its records again: it repeats the updates after its checkpoint, and
    may have begun without TensorBoard.
    """

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415
        except ImportError:
            raise InputError(
                "tensorboard", "is not installed", "run pip install 'ghostbatch[tensorboard]'"
            ) from None
        self._open = SummaryWriter
        self._folder = folder
        self._writer: Any = None

    def __call__(self, record: Record) -> None:
        """Write one record; `train` has already written it to ``metrics.jsonl``."""
        records = [record]
        if self._writer is None:
            self._writer = self._open(str(self._folder / "tensorboard"), purge_step=0)
            records = read_records(self._folder / "metrics.jsonl", skip_damaged=True) or records
        for each in records:
            for name in SCALARS:
                if (value := getattr(each, name)) is not None:
                    self._writer.add_scalar(f"{each.split}/{name}", value, each.update)
        self._writer.flush()
