"""Which device each job of a study runs on, which does not change its numbers.

A job takes a share of a GPU that grows with the images of one backward pass, and a GPU runs jobs
whose shares add up to at most 1. A CPU takes any number of jobs, and so does "cuda", for which Ray
chooses the GPU. Over all devices at most ``jobs`` run at a time.
"""

from collections.abc import Sequence
from math import prod

from ghostbatch.errors import InputError

FULL_LOAD = 2**22
"""Pixel values per backward pass that fill a GPU: 1,365 images of CIFAR, 27 of ImageNet."""

SMALLEST_SHARE = 1 / 16
"""Every process needs some memory and time of its GPU, however small its batch."""


def find_devices(device: str | None, gpus: int, ranks: int = 1) -> tuple[str, ...]:
    """Return the devices for a study, on a machine with this number of GPUs.

    Each device is for ``ranks`` processes of one job: as many GPUs, or the CPU.

    >>> find_devices(None, 2), find_devices("cuda:1", 2), find_devices(None, 0)
    (('cuda:0', 'cuda:1'), ('cuda:1',), ('cpu',))
    >>> find_devices(None, 5, ranks=2), find_devices("cpu", 5, ranks=2)
    (('cuda:0,1', 'cuda:2,3'), ('cpu',))
    """
    if not gpus or device not in (None, "cuda"):
        if ranks > 1 and device is not None and device != "cpu":
            raise InputError("ranks", f"{ranks} ranks do not run on {device}", "use cuda or cpu")
        return (device or "cpu",)
    if gpus < ranks:
        problem = f"{ranks} ranks need as many GPUs, and there are {gpus}"
        raise InputError("ranks", problem, "use fewer ranks, or device cpu")
    starts = range(0, gpus - ranks + 1, ranks)
    return tuple(f"cuda:{','.join(map(str, range(n, n + ranks)))}" for n in starts)


def gpu_share(samples: int, shape: Sequence[int]) -> float:
    """Return the share of a GPU for a job with ``samples`` images of a shape per backward pass.

    >>> gpu_share(32, (1, 28, 28)), gpu_share(1024, (3, 32, 32)), gpu_share(4096, (3, 32, 32))
    (0.0625, 0.75, 1.0)
    """
    return min(1.0, max(SMALLEST_SHARE, samples * prod(shape) / FULL_LOAD))


class Placement:
    """Keeps count of the jobs on each device."""

    def __init__(self, devices: Sequence[str], jobs: int) -> None:
        self._shares: dict[str, list[float]] = {device: [] for device in devices}
        self._jobs = jobs

    def take(self, share: float) -> str | None:
        """Return the least loaded device with room for one more job, and count the job there.

        Return None if no device has room, or if enough jobs are running.
        """
        if sum(map(len, self._shares.values())) >= self._jobs:
            return None
        device = min(self._shares, key=lambda device: sum(self._shares[device]))
        if device.startswith("cuda:") and sum(self._shares[device]) + share > 1:
            return None
        self._shares[device].append(share)
        return device

    def release(self, device: str, share: float) -> None:
        """Stop counting a job that has ended."""
        self._shares[device].remove(share)
