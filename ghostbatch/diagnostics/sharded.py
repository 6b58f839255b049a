"""Tensors that are spread over ranks (DTensor, as FSDP2 makes them), and ordinary ones alike."""

import sys
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ghostbatch.errors import InputError


def as_dtensor(tensor: Tensor) -> Any:
    """The tensor if it is a DTensor, else None; without importing what is slow to import."""
    module = sys.modules.get("torch.distributed.tensor")
    return tensor if module is not None and isinstance(tensor, module.DTensor) else None


def local(tensor: Tensor) -> Tensor:
    """The part that this rank has."""
    spread = as_dtensor(tensor)
    return tensor if spread is None else spread.to_local()


def spread_like(pattern: Tensor, part: Tensor) -> Tensor:
    """``part`` as this rank's part of a tensor that is spread as ``pattern`` is."""
    spread = as_dtensor(pattern)
    if spread is None:
        return part
    return type(spread).from_local(  # type: ignore[no-any-return]
        part,
        spread.device_mesh,
        spread.placements,
        run_check=False,
        shape=spread.shape,
        stride=spread.stride(),
    )


def same_place(tensor: Tensor, pattern: Tensor) -> Tensor:
    """``tensor`` spread as ``pattern`` is; a whole one is cut, which all ranks do together."""
    spread, wanted = as_dtensor(tensor), as_dtensor(pattern)
    if wanted is None:
        return tensor if spread is None else spread.full_tensor()
    if spread is None:
        whole = sys.modules["torch.distributed.tensor"].distribute_tensor
        spread = whole(tensor.to(local(pattern).device), wanted.device_mesh, wanted.placements)
    return spread.redistribute(wanted.device_mesh, wanted.placements)  # type: ignore[no-any-return]


def sum_shards(squares: Tensor, tensors: Sequence[Tensor]) -> Tensor:
    """Sums over ranks of what each has computed of its part of ``tensors``, on every rank.

    There is one collective for each dimension of the device mesh along which anything is sharded:
    one for FSDP2, also if it replicates over nodes, and none for ordinary tensors.
    """
    spread = [as_dtensor(tensor) for tensor in tensors]
    meshes = {each.device_mesh for each in spread if each is not None}
    if not meshes:
        return squares
    if len(meshes) > 1:
        raise InputError(
            "model", "its parameters are spread over several device meshes", "use a single one"
        )
    mesh = meshes.pop()
    for dim in range(mesh.ndim):
        shards = [each is not None and each.placements[dim].is_shard() for each in spread]
        if any(shards):  # what is whole on every rank must not be counted by each
            share = [1.0 if shard else 1 / mesh.size(dim) for shard in shards]
            squares = squares * squares.new_tensor(share)
            dist.all_reduce(squares, group=mesh.get_group(dim))
    return squares
