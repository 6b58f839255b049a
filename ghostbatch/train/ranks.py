"""The processes that train one model together; one process is the case of one rank."""

import gc
import inspect
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ghostbatch.errors import InputError, RankError, portable

Answer = TypeVar("Answer")

# Public names of PyTorch that builds without torch.distributed lack.
_rendezvous: Any = getattr(dist, "rendezvous", None)
_PrefixStore: Any = getattr(dist, "PrefixStore", None)


@dataclass(frozen=True)
class Ranks:
    """The rank of this process and the number of ranks. With one rank nothing is ever sent."""

    rank: int = 0
    world: int = 1

    def sum(self, values: Tensor) -> Tensor:
        """Sum the values over all ranks, in place, and return them."""
        if self.world > 1:
            dist.all_reduce(values)
        return values

    def on_rank_zero(self, ask: Callable[[], Answer]) -> Answer:
        """Call ``ask`` on the first rank; return its answer, or raise its error, on every rank."""
        if self.world == 1:
            return ask()
        box: list[Any] = [None]
        if self.rank == 0:
            try:
                box = [ask()]
            except (InputError, OSError) as error:
                box = [portable(error)]
        dist.broadcast_object_list(box)
        if isinstance(box[0], InputError | OSError):
            raise box[0]
        return box[0]  # type: ignore[no-any-return]

    def all_or_none(self, ask: Callable[[], Answer], seconds: float | None = None) -> Answer:
        """Call ``ask`` on every rank and return each one's answer; if one raises, all raise.

        Args:
            ask: what may take different times on different ranks.
            seconds: how long ranks wait for each other here, if not as long as elsewhere.

        """
        if self.world == 1:
            return ask()
        group = None
        if seconds is not None:
            group = dist.new_group(timeout=timedelta(seconds=seconds), backend="gloo")
        found, refusal = None, None
        try:
            found = ask()
        except (InputError, OSError) as error:
            refusal = portable(error)
        everyone = self.gather(refusal, group)
        if group is not None:
            dist.destroy_process_group(group)
        for refused in filter(None, everyone):
            raise refused
        return found  # type: ignore[return-value]

    def gather(self, mine: Answer, group: Any = None) -> list[Answer]:
        """Return every rank's value, in their order."""
        if self.world == 1:
            return [mine]
        everyone: list[Any] = [None] * self.world
        dist.all_gather_object(everyone, mine, group=group)
        return everyone

    def parallel(self, model: nn.Module, find_unused: bool = False) -> nn.Module:
        """Wrap the model in DDP if there are several ranks; buffers need no broadcast.

        ``find_unused`` lets a forward leave out some of the parameters, which takes longer.
        """
        if self.world == 1:
            return model
        known = inspect.signature(DistributedDataParallel).parameters
        newer = "forward_sync_buffers" in known  # the name in later releases of PyTorch
        options = {"forward_sync_buffers" if newer else "broadcast_buffers": False}
        options["find_unused_parameters"] = find_unused
        return DistributedDataParallel(model, **options)  # type: ignore[arg-type]


TIMEOUT = 600.0
"""Seconds that ranks wait for each other, unless the user says otherwise."""


@contextmanager
def joined(device: torch.device, timeout: float = TIMEOUT) -> Iterator[Ranks]:
    """Yield the ranks of the caller's process group, or of torchrun, or a single one.

    ``timeout`` is in seconds; a process group of the caller has its own.
    """
    if dist.is_available() and dist.is_initialized():
        with _explain_lost_rank("in the time of its process group"):
            yield Ranks(dist.get_rank(), dist.get_world_size())
    elif int(os.environ.get("WORLD_SIZE", "1")) > 1:
        _start(device, timeout)
        try:
            with _explain_lost_rank(f"within {timeout:g} seconds"):
                yield Ranks(dist.get_rank(), dist.get_world_size())
        finally:
            leave()
    else:
        yield Ranks()


def _start(device: torch.device, timeout: float) -> None:
    """Create the process group of the ranks that torchrun has started."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    starting = max(timeout, TIMEOUT)  # processes may start at quite different times
    with _explain_lost_rank(f"within {starting:g} seconds"):
        store, rank, world = next(_rendezvous("env://", timeout=timedelta(seconds=starting)))
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            store=_PrefixStore(agree_on_name(store, rank, world), store),
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=timeout),
        )


LATE = ("Timed out waiting", "timeout caused pair closure", "wait timeout after")
GONE = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")


@contextmanager
def _explain_lost_rank(when: str) -> Iterator[None]:
    """Turn the error of a collective that a rank did not take part in into one line.

    gloo and the store raise plain RuntimeErrors, so only their texts tell. On GPUs NCCL does not
    raise: its own thread ends the process after the time-out.
    """
    try:
        yield
    except RuntimeError as error:
        text = str(error)
        again = "run the same command again to continue from the last checkpoint"
        if any(late in text for late in LATE):
            line = f"a rank did not answer {when}; end all ranks and {again}"
            raise RankError(f"{line}, with a longer timeout if none was stopped") from error
        if any(gone in text for gone in GONE):
            raise RankError(f"a rank has ended; {again}") from error
        raise


def leave() -> None:
    """Destroy the process group.

    A dropped DDP model keeps the group alive until it is garbage-collected. If its threads live
    until the process ends, they sometimes abort it: "terminate called without an active exception".
    """
    gc.collect()
    dist.destroy_process_group()


def agree_on_name(store: Any, rank: int, world: int) -> str:
    """Return a name for this start of the ranks that no earlier start has used.

    After a restart torchrun hands out the same store, which still holds the addresses of the ranks
    before. So the first rank chooses a new name. It answers every greeting in the store, old ones
    too, until all ranks have its name.
    """
    mine = uuid4().hex
    if rank > 0:
        store.set(f"greeting/{rank}", mine)
        name = str(store.get(f"answer/{mine}").decode())
        store.set(f"heard/{name}/{rank}", "")
        return name
    deadline = time.monotonic() + store.timeout.total_seconds()
    for other in range(1, world):
        while not store.check([f"heard/{mine}/{other}"]):
            if time.monotonic() > deadline:
                raise RuntimeError(f"wait timeout after {store.timeout}: rank {other}")
            greeting = store.get(f"greeting/{other}").decode()
            store.set(f"answer/{greeting}", mine)
            time.sleep(0.01)
    return mine
