"""How the batches of a recipe are split for its network, and what to do if they do not fit."""

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ghostbatch.data import BatchSplit
from ghostbatch.errors import InputError, check_types
from ghostbatch.nn.norm import GhostBatchNorm
from ghostbatch.recipe import Recipe


def split_batch(recipe: Recipe, model: nn.Module, micro: int | None, world: int) -> BatchSplit:
    """Return how the batches of ``model`` are split over ``world`` ranks.

    Sizes that would change the ghosts are refused.
    """
    norms = {name: m for name, m in model.named_modules() if isinstance(m, _BatchNorm)}
    split = BatchSplit(
        batch=recipe.batch,
        micro=recipe.batch if micro is None else micro,
        world=world,
        multiple_of=(recipe.ghost or 1) if norms else 1,
        needs_full_batch=bool(norms) and recipe.ghost is None,
        is_given=micro is not None,
    )
    check_types(split)
    split.check()
    for name, norm in norms.items():
        known = type(norm) in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
        if known or isinstance(norm, GhostBatchNorm) or (world == 1 and split.micro == split.batch):
            continue
        raise InputError(
            "model",
            f"{name} ({type(norm).__name__}) is an unknown kind of batch norm, which would "
            "normalise each part of a split batch by itself",
            "use one rank and no micro-batches, or a model with plain BatchNorm layers",
        )
    if recipe.ghost and recipe.running == "mean" and split.micro != split.batch:
        raise InputError(
            "micro",
            'running "mean" takes the mean over all ghosts of a batch at once',
            "leave micro out, or use running sequential",
        )
    return split


def memory_remedy(split: BatchSplit) -> str:
    """Say what to do if a backward pass does not fit into memory."""
    if (smaller := split.smaller()) is not None:
        return f"use micro {smaller}: the same numbers in less memory"
    if split.needs_full_batch:
        return "use more ranks, or ghost batch norm, which can be split into micro-batches"
    if split.shard == split.multiple_of:
        return "use a smaller ghost or network: the micro-batch is one ghost already"
    return f"use a batch that {split.multiple_of} divides: it can be split into micro-batches"


def evaluation_remedy(split: BatchSplit, samples: int) -> str:
    """Say what to do if an evaluation of ``samples`` at a time does not fit into memory."""
    micros = [m for m in split.allowed_micros() if m <= samples * split.world // 2]
    if not micros:
        return "use a smaller network, or a device with more memory"
    return f"use micro {max(micros)}: an evaluation takes as many at a time"
