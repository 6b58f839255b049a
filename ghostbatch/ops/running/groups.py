"""Which ranks a layer shares its running statistics with.

A process group is kept by its name: an attribute that holds the group itself would break
``copy.deepcopy`` and pickling of the model.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ghostbatch.errors import InputError, RankError

LOCAL = "local"
"""Pass as ``process_group`` to keep statistics to this rank: independent runs on each."""

Group = str | None
"""The name of a group, `LOCAL`, or None for the default group."""


def name_of(process_group: "dist.ProcessGroup | str | None") -> Group:
    """Return the name by which a layer keeps the process group."""
    if process_group is None or isinstance(process_group, str):
        return process_group
    if not hasattr(process_group, "group_name"):
        problem = f"this {type(process_group).__name__} is not one"
        raise InputError("process_group", problem, "give a ProcessGroup, its name, LOCAL or None")
    return process_group.group_name


def ranks_in(group: Group) -> int:
    """Return the number of ranks in the group; 1 where nothing is distributed."""
    if group == LOCAL or not dist.is_available() or not dist.is_initialized():
        return 1
    return dist.get_world_size(resolve(group))


def gather(vector: Tensor, group: Group) -> Tensor:
    """Return the vectors of all ranks, (ranks, length), by one collective."""
    everyone = vector.new_empty(ranks_in(group) * vector.numel())
    # Newer releases of PyTorch have renamed it.
    collect = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    with _explained():
        collect(everyone, vector, group=resolve(group))
    return everyone.view(-1, vector.numel())


def gather_objects(own: Any, group: Group) -> list[Any]:
    """Return the objects of all ranks; they are pickled, which takes two collectives."""
    everyone = [None] * ranks_in(group)
    with _explained():
        dist.all_gather_object(everyone, own, group=resolve(group))
    return everyone


@contextmanager
def _explained() -> Iterator[None]:
    """Turn the failure of a collective, such as its time-out, into one line."""
    try:
        yield
    except RuntimeError as error:
        raise RankError(
            "running statistics: a rank did not take part in their exchange "
            f"({str(error).splitlines()[0]}); run the same forward and backward passes on every "
            "rank, or keep statistics to each rank with process_group=gb.LOCAL"
        ) from error


def resolve(group: Group) -> "dist.ProcessGroup":
    """Return the process group of that name."""
    by_name: Any = dist.distributed_c10d._resolve_process_group  # type: ignore[attr-defined]
    found: Any = dist.group.WORLD if group is None else by_name(group)
    return found  # type: ignore[no-any-return]
