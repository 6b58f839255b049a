"""Operations on tensors that may be sharded over ranks (DTensor, as FSDP2 makes them)."""

import sys
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ghostbatch.errors import InputError


def as_dtensor(tensor: Tensor) -> Any:
    """Return the tensor if it is a DTensor, else None, without importing DTensor's slow module."""
    module = sys.modules.get("torch.distributed.tensor")
    return tensor if module is not None and isinstance(tensor, module.DTensor) else None


def to_local(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a DTensor, or an ordinary tensor itself."""
    sharded = as_dtensor(tensor)
    return tensor if sharded is None else sharded.to_local()


def from_local(shard: Tensor, like: Tensor) -> Tensor:
    """Return the tensor sharded as ``like`` of which this rank holds ``shard``."""
    sharded = as_dtensor(like)
    if sharded is None:
        return shard
    return type(sharded).from_local(  # type: ignore[no-any-return]
        shard,
        sharded.device_mesh,
        sharded.placements,
        run_check=False,
        shape=sharded.shape,
        stride=sharded.stride(),
    )


def redistribute(tensor: Tensor, like: Tensor) -> Tensor:
    """Return ``tensor`` sharded (or not) as ``like`` is; call it on all ranks."""
    sharded, wanted = as_dtensor(tensor), as_dtensor(like)
    if wanted is None:
        return tensor if sharded is None else sharded.full_tensor()
    if sharded is None:
        distribute = sys.modules["torch.distributed.tensor"].distribute_tensor
        sharded = distribute(
            tensor.to(to_local(like).device), wanted.device_mesh, wanted.placements
        )
    return sharded.redistribute(  # type: ignore[no-any-return]
        wanted.device_mesh, wanted.placements
    )


def sum_shards(squares: Tensor, tensors: Sequence[Tensor]) -> Tensor:
    """Add up ``squares``, one value per tensor computed from this rank's shard, over all ranks.

    It takes one collective for each dimension of the device mesh along which a tensor is sharded:
    one for FSDP2, also if it replicates over nodes, and none for ordinary tensors.
    """
    sharded = [as_dtensor(tensor) for tensor in tensors]
    meshes = {each.device_mesh for each in sharded if each is not None}
    if not meshes:
        return squares
    if len(meshes) > 1:
        raise InputError("model", "its parameters are on several device meshes", "use a single one")
    mesh = meshes.pop()
    for dim in range(mesh.ndim):
        shards = [each is not None and each.placements[dim].is_shard() for each in sharded]
        if any(shards):
            # A tensor that is replicated along this dimension must count once, not once per rank.
            scale = [1.0 if shard else 1 / mesh.size(dim) for shard in shards]
            squares = squares * squares.new_tensor(scale)
            dist.all_reduce(squares, group=mesh.get_group(dim))
    return squares
