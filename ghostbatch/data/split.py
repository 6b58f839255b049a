"""How a batch is split: into micro-batches first, then each micro-batch over the ranks."""

from dataclasses import dataclass

from ghostbatch.errors import InputError


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

    @property
    def _step(self) -> int:
        """What a micro-batch must be a multiple of, so that each rank has whole ghosts."""
        return self.world * self.multiple_of

    def positions(self, rank: int, batches: int = 1) -> list[slice]:
        """Return the positions in the batch that one rank computes, one slice per backward pass.

        If an update takes several ``batches``, those of each follow those of the one before.

        >>> BatchSplit(batch=16, micro=8, world=2, multiple_of=4).positions(rank=1)
        [slice(4, 8, None), slice(12, 16, None)]
        """
        starts = range(rank * self.shard, batches * self.batch, self.micro)
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
            problem = f"plain batch norm normalises all {self.batch} samples at once"
            raise InputError("micro", problem, without_ghosts)
        is_split = self.micro != self.batch or self.world > 1
        if self.batch % self.micro or (is_split and self.micro % self._step):
            field = "micro" if self.world == 1 or self.micro != self.batch else "ranks"
            problem = f"batch {self.batch} does not split into micro-batches of {self.micro}"
            if self.world > 1:
                problem += f" over {self.world} ranks"
            if self.multiple_of > 1:
                problem += f" without splitting ghosts of {self.multiple_of}"
            raise InputError(field, problem, self._remedy())

    def allowed_micros(self) -> set[int]:
        """Return every micro-batch that could be asked for, the batch included."""
        return {*self._valid_micros(), self.batch}

    def _valid_micros(self) -> list[int]:
        """Return every micro-batch that this number of ranks could take."""
        if self.needs_full_batch:
            return []
        return [m for m in range(self._step, self.batch + 1, self._step) if self.batch % m == 0]

    def _remedy(self) -> str:
        if micros := self._valid_micros():
            return f"use micro {_listed(micros)}"
        step, ghost = self._step, self.multiple_of
        other = f"a batch that {step} divides, such as {max(1, round(self.batch / step)) * step}"
        if self.world == 1:
            return f"leave micro out, or use {other}"
        worlds = [w for w in range(1, self.world) if w == 1 or self.batch % (w * ghost) == 0]
        leave = "" if self.micro == self.batch else "leave micro out and "
        return f"{leave}use {_listed(worlds)} rank{'s' if worlds != [1] else ''}, or {other}"


def _listed(sizes: list[int]) -> str:
    """Return the four largest sizes as a choice in words: "64, 32 or 16"."""
    *others, last = (str(size) for size in sorted(sizes, reverse=True)[:4])
    return f"{', '.join(others)} or {last}" if others else last
