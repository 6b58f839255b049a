"""Random draws that depend on what they are for, never on when or where they are made."""

from hashlib import blake2b

import torch


def generator(seed: int, purpose: str, index: int = 0) -> torch.Generator:
    """A CPU generator for draw number ``index`` (an update, a permutation) of one purpose.

    Draws for a whole global batch come from one such generator, so the value at a position does
    not depend on ranks, micro-batches or on where a run was resumed.

    >>> a, b = generator(0, "order", 7), generator(0, "order", 7)
    >>> torch.rand(3, generator=a).equal(torch.rand(3, generator=b))
    True
    """
    return torch.Generator().manual_seed(key(seed, purpose, index))


def key(seed: int, purpose: str, index: int = 0) -> int:
    """A 63-bit number for one purpose; unlike seed + index, no two purposes ever share one."""
    digest = blake2b(f"{seed}/{purpose}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1
