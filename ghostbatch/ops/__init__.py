"""Ghost batch normalisation as a function, and the slow twin that defines it."""

from ghostbatch.ops.functional import ghost_batch_norm
from ghostbatch.ops.reference import (
    Running,
    ghost_batch_norm_reference,
    ghost_count,
    ghost_sizes,
)
from ghostbatch.ops.running.groups import LOCAL

__all__ = [
    "LOCAL",
    "Running",
    "ghost_batch_norm",
    "ghost_batch_norm_reference",
    "ghost_count",
    "ghost_sizes",
]
