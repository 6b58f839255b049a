"""How a batch is cut: into micro-batches first, then each contiguously over the ranks."""

from dataclasses import dataclass

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ghostbatch.errors import InputError
from ghostbatch.nn.norm import GhostBatchNorm
from ghostbatch.recipe import Recipe


@dataclass(frozen=True)
class BatchSplit:
    """The pieces of a batch; what is normalised together is never parted."""

    batch: int
    """Samples per update, over all ranks."""
    micro: int
    """Samples per backward pass, over all ranks."""
    world: int
    """Ranks."""
    unit: int
    """Samples that must stay together on a rank: a ghost, or 1 without batch norm."""
    whole: bool = False
    """Whether plain batch norm needs each batch in one pass."""

    @property
    def shard(self) -> int:
        """Samples per backward pass on one rank."""
        return self.micro // self.world

    def pieces(self, rank: int) -> list[slice]:
        """Positions in the batch of what one rank sees, one slice per backward pass.

        >>> BatchSplit(batch=16, micro=8, world=2, unit=4).pieces(rank=1)
        [slice(4, 8, None), slice(12, 16, None)]
        """
        starts = range(rank * self.shard, self.batch, self.micro)
        return [slice(start, start + self.shard) for start in starts]

    def smaller(self) -> int | None:
        """The next micro-batch to try where memory does not suffice: about half of this one."""
        fitting = [m for m in self._micros() if m <= self.micro // 2]
        return max(fitting, default=None)

    def check(self) -> None:
        """Refuse sizes that do not divide, and name those that would."""
        if self.micro < 1:
            raise InputError("micro", f"{self.micro} is below 1", self._remedy())
        if self.whole and self.micro != self.batch:
            raise InputError(
                "micro",
                f"plain batch norm normalises all {self.batch} samples at once",
                "leave micro out, or set a ghost size that divides it",
            )
        step = self.world * self.unit
        parted = self.micro != self.batch or self.world > 1
        if self.batch % self.micro or (parted and self.micro % step):
            ranks = f" for {self.world} ranks" if self.world > 1 else ""
            ghosts = f" of whole ghosts of {self.unit}" if self.unit > 1 else ""
            raise InputError(
                "micro" if self.world == 1 or self.micro != self.batch else "ranks",
                f"batch {self.batch} cannot be cut into pieces of {self.micro}{ranks}{ghosts}",
                self._remedy(),
            )

    def _micros(self) -> list[int]:
        """Every micro-batch that these ranks could take."""
        if self.whole:
            return []
        step = self.world * self.unit
        return [m for m in range(step, self.batch + 1, step) if self.batch % m == 0]

    def _remedy(self) -> str:
        if micros := self._micros():
            return f"use micro {_listed(micros)}"
        step = self.world * self.unit
        other = f"a batch that {step} divides, such as {max(1, round(self.batch / step)) * step}"
        if self.world == 1:
            return f"leave micro out, or use {other}"
        worlds = [w for w in range(1, self.world) if w == 1 or self.batch % (w * self.unit) == 0]
        whole = "" if self.micro == self.batch else "leave micro out and "
        return f"{whole}use {_listed(worlds)} rank{'s' if worlds != [1] else ''}, or {other}"


def split_batch(recipe: Recipe, model: nn.Module, micro: int | None, world: int) -> BatchSplit:
    """How this model's batches are cut on so many ranks; refused if its ghosts would change."""
    normed = any(isinstance(layer, _BatchNorm) for layer in model.modules())
    cut = BatchSplit(
        batch=recipe.batch,
        micro=recipe.batch if micro is None else micro,
        world=world,
        unit=(recipe.ghost or 1) if normed else 1,
        whole=normed and recipe.ghost is None,
    )
    cut.check()
    foreign = [
        f"{name} ({type(layer).__name__})"
        for name, layer in model.named_modules()
        if isinstance(layer, _BatchNorm)
        and not isinstance(layer, GhostBatchNorm)
        and type(layer) not in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
    ]
    if foreign and (world > 1 or cut.micro != cut.batch):
        raise InputError(
            "model",
            f"{foreign[0]} is a batch norm of another kind, which would see the pieces of a batch",
            "use one rank and no micro-batches, or a model with plain BatchNorm layers",
        )
    if recipe.ghost and recipe.running == "mean" and cut.micro != cut.batch:
        raise InputError(
            "micro",
            'running "mean" takes the mean over all ghosts of a batch at once',
            "leave micro out, or use running sequential",
        )
    return cut


def _listed(sizes: list[int]) -> str:
    """The largest few, as people write a choice."""
    *others, last = (str(size) for size in sorted(sizes, reverse=True)[:4])
    return f"{', '.join(others)} or {last}" if others else last
