"""Which ranks a layer shares its running statistics with.

A process group is kept by its name: an attribute that holds the group itself would break
``copy.deepcopy`` and pickling of the model.
"""

from typing import Any

import torch.distributed as dist
from torch import Tensor

LOCAL = "local"
"""Pass as ``process_group`` to keep statistics to this rank: independent runs on each."""

Group = str | None
"""The name of a group, `LOCAL`, or None for the default group."""


def name_of(process_group: "dist.ProcessGroup | str | None") -> Group:
    """Return the name by which a layer keeps the process group."""
    if process_group is None or isinstance(process_group, str):
        return process_group
    return process_group.group_name


def ranks_in(group: Group) -> int:
    """Return the number of ranks in the group; 1 where nothing is distributed."""
    if group == LOCAL or not dist.is_available() or not dist.is_initialized():
        return 1
    return dist.get_world_size(_resolve(group))


def gather(vector: Tensor, group: Group) -> Tensor:
    """Return the vectors of all ranks, (ranks, length), by one collective."""
    everyone = vector.new_empty(ranks_in(group) * vector.numel())
    # Newer releases of PyTorch have renamed it.
    collect = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    collect(everyone, vector, group=_resolve(group))
    return everyone.view(-1, vector.numel())


def _resolve(group: Group) -> "dist.ProcessGroup | None":
    resolve: Any = dist.distributed_c10d._resolve_process_group  # type: ignore[attr-defined]
    return None if group is None else resolve(group)
