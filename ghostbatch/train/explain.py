"""Faults of the machine during a run, as errors of one line."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ghostbatch.errors import RankLocalError

NO_MEMORY = ("can't allocate memory", "out of memory", "_STATUS_ALLOC_FAILED")
"""What PyTorch's errors say, on the CPU and on a GPU."""


@contextmanager
def explain_faults(field: str, problem: str, remedy: str) -> Iterator[None]:
    """Turn an out-of-memory error into an `InputError` of these parts.

    The death of a process that decodes images becomes an `InputError`, too: PyTorch raises it as a
    RuntimeError in whatever the main thread is doing.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        text = str(error)
        if "DataLoader worker" in text:
            raise RankLocalError(
                "workers",
                f"a process that decodes images ended ({text.split('.', 1)[0]})",
                "run the same command again to continue; if memory ran out, use fewer workers",
            ) from None
        if lacks_memory(error):
            raise RankLocalError(field, problem, remedy) from None
        raise


def lacks_memory(error: Exception) -> bool:
    """Return whether an error says that memory has run out."""
    is_known = isinstance(error, torch.OutOfMemoryError | MemoryError)
    return is_known or any(words in str(error) for words in NO_MEMORY)
