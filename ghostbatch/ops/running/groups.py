"""Which ranks a layer shares its statistics with.

A process group is kept by its name: an attribute that holds the group itself would break
``copy.deepcopy`` and pickling of the model.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

LOCAL = "local"
"""Pass as ``process_group`` to keep statistics to this rank: independent runs on each."""

Group = str | None
"""The name of a group, `LOCAL`, or None for the default group."""


def name_of(process_group: "dist.ProcessGroup | str | None") -> Group:
    """The name to keep of what the user gave."""
    if process_group is None or isinstance(process_group, str):
        return process_group
    return process_group.group_name


def ranks_in(group: Group) -> int:
    """How many ranks share statistics; 1 where nothing is distributed."""
    if group == LOCAL or not dist.is_available() or not dist.is_initialized():
        return 1
    return dist.get_world_size(_resolve(group))


def gather(vector: Tensor, group: Group) -> Tensor:
    """The vectors of all ranks, (ranks, length): one collective."""
    everyone = vector.new_empty(ranks_in(group) * vector.numel())
    # Newer releases of PyTorch have renamed it.
    collect = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    collect(everyone, vector, group=_resolve(group))
    return everyone.view(-1, vector.numel())


def _resolve(group: Group) -> "dist.ProcessGroup | None":
    resolve: Any = dist.distributed_c10d._resolve_process_group  # type: ignore[attr-defined]
    return None if group is None else resolve(group)


def inside_backward() -> bool:
    """Whether autograd is running: then a forward is a re-run by activation checkpointing."""
    return torch._C._current_graph_task_id() != -1
