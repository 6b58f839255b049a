"""Random generators keyed by seed, purpose and index, never by when or where they are used."""

from hashlib import blake2b

import torch


def generator(seed: int, purpose: str, index: int = 0) -> torch.Generator:
    """Return a CPU generator for draw ``index`` (an update, a permutation) of one purpose.

    All draws for a global batch come from one such generator, so the value at a position does not
    depend on ranks, micro-batches or where a run was resumed.

    >>> a, b = generator(0, "order", 7), generator(0, "order", 7)
    >>> torch.rand(3, generator=a).equal(torch.rand(3, generator=b))
    True
    """
    return torch.Generator().manual_seed(key(seed, purpose, index))


def key(seed: int, purpose: str, index: int = 0) -> int:
    """Return a 63-bit hash of seed, purpose and index, to seed one draw."""
    digest = blake2b(f"{seed}/{purpose}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1


def seed_generators(seed: int, device: torch.device) -> None:
    """Seed PyTorch's default generators of the CPU and of ``device``.

    ``torch.manual_seed`` seeds those of every kind of device, which takes longer than a small
    network's update.
    """
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        torch.cuda.default_generators[index].manual_seed(seed)
