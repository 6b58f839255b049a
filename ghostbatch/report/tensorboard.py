"""The records of ``metrics.jsonl`` as TensorBoard's scalars, for those who have it."""

from pathlib import Path
from typing import Any

from ghostbatch.errors import InputError
from ghostbatch.train import Record

SCALARS = ("loss", "accuracy", "lr", "distance", "gradient_norm", "clipped")


class TensorBoard:
    """Pass it to `train` as ``on_record``; its files go to ``folder/tensorboard``.

    What a resumed run does again replaces what was written of it before.
    """

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415
        except ImportError:
            raise InputError(
                "tensorboard", "it is not installed", "pip install 'ghostbatch[tensorboard]'"
            ) from None
        self._open = SummaryWriter
        self._folder = folder / "tensorboard"
        self._writer: Any = None

    def __call__(self, record: Record) -> None:
        """Write one record."""
        if self._writer is None:
            self._writer = self._open(str(self._folder), purge_step=record.update)
        for name in SCALARS:
            if (value := getattr(record, name)) is not None:
                self._writer.add_scalar(f"{record.split}/{name}", value, record.update)
        self._writer.flush()
