"""How a batch is split: into micro-batches first, then each micro-batch over the ranks."""

from dataclasses import dataclass

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ghostbatch.errors import InputError
from ghostbatch.nn.norm import GhostBatchNorm
from ghostbatch.recipe import Recipe


@dataclass(frozen=True)
class BatchSplit:
    """Sizes of the parts of a batch; samples that are normalised together stay together."""

    batch: int
    """Samples per update, over all ranks."""
    micro: int
    """Samples per backward pass, over all ranks."""
    world: int
    """Number of ranks."""
    multiple_of: int
    """The shard of a rank must be a multiple of this: the ghost size, or 1 without batch norm."""
    needs_full_batch: bool = False
    """Whether plain batch norm needs the batch in one backward pass."""
    is_given: bool = False
    """Whether ``micro`` was asked for; it then limits the samples of an evaluation, too."""

    @property
    def shard(self) -> int:
        """Samples per backward pass on one rank."""
        return self.micro // self.world

    def positions(self, rank: int) -> list[slice]:
        """Return the positions in the batch that one rank computes, one slice per backward pass.

        >>> BatchSplit(batch=16, micro=8, world=2, multiple_of=4).positions(rank=1)
        [slice(4, 8, None), slice(12, 16, None)]
        """
        starts = range(rank * self.shard, self.batch, self.micro)
        return [slice(start, start + self.shard) for start in starts]

    @property
    def eval_shard(self) -> int | None:
        """Largest number of samples per forward pass of an evaluation; None is no limit."""
        return self.shard if self.is_given else None

    def smaller(self) -> int | None:
        """Return the largest valid micro-batch that is at most half of this one, if any."""
        return max((m for m in self._valid_micros() if m <= self.micro // 2), default=None)

    def check(self) -> None:
        """Raise InputError unless the batch splits evenly; the remedy lists sizes that do."""
        without_ghosts = "leave micro out, or set a ghost size that divides it"
        if self.micro < 1:
            remedy = without_ghosts if self.needs_full_batch else self._remedy()
            raise InputError("micro", f"{self.micro} is below 1", remedy)
        if self.needs_full_batch and self.micro != self.batch:
            raise InputError(
                "micro",
                f"plain batch norm normalises all {self.batch} samples at once",
                without_ghosts,
            )
        step = self.world * self.multiple_of
        is_split = self.micro != self.batch or self.world > 1
        if self.batch % self.micro or (is_split and self.micro % step):
            ranks = f" over {self.world} ranks" if self.world > 1 else ""
            ghosts = (
                f" without splitting ghosts of {self.multiple_of}" if self.multiple_of > 1 else ""
            )
            raise InputError(
                "micro" if self.world == 1 or self.micro != self.batch else "ranks",
                f"batch {self.batch} does not split into micro-batches of {self.micro}"
                f"{ranks}{ghosts}",
                self._remedy(),
            )

    def allowed_micros(self) -> set[int]:
        """Return every micro-batch that could be asked for, the batch included."""
        return {*self._valid_micros(), self.batch}

    def _valid_micros(self) -> list[int]:
        """Return every micro-batch that this number of ranks could take."""
        if self.needs_full_batch:
            return []
        step = self.world * self.multiple_of
        return [m for m in range(step, self.batch + 1, step) if self.batch % m == 0]

    def _remedy(self) -> str:
        if micros := self._valid_micros():
            return f"use micro {_listed(micros)}"
        step = self.world * self.multiple_of
        other = f"a batch that {step} divides, such as {max(1, round(self.batch / step)) * step}"
        if self.world == 1:
            return f"leave micro out, or use {other}"
        step = self.multiple_of
        worlds = [w for w in range(1, self.world) if w == 1 or self.batch % (w * step) == 0]
        leave = "" if self.micro == self.batch else "leave micro out and "
        return f"{leave}use {_listed(worlds)} rank{'s' if worlds != [1] else ''}, or {other}"


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


def _listed(sizes: list[int]) -> str:
    """Return the four largest sizes as a choice in words: "64, 32 or 16"."""
    *others, last = (str(size) for size in sorted(sizes, reverse=True)[:4])
    return f"{', '.join(others)} or {last}" if others else last
