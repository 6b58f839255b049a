"""Ghost batch normalisation as a function, and the slow twin that defines it."""

from ghostbatch.ops.ghost_norm import ghost_batch_norm
from ghostbatch.ops.ranks import LOCAL
from ghostbatch.ops.reference import Activation, Running, ghost_batch_norm_reference, ghost_sizes

__all__ = [
    "LOCAL",
    "Activation",
    "Running",
    "ghost_batch_norm",
    "ghost_batch_norm_reference",
    "ghost_sizes",
]
