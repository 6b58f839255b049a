"""How ranks send each other their contributions: one collective, in which a mismatch shows.

Ranks may differ in what they have to send: one has run other layers, or has run a forward more. A
collective of unequal lengths aborts or hangs, and one of equal lengths would mix the statistics of
different layers. So every message begins with a header that says what follows:

- a code of its *layout*, the widths of the layers in order, which fixes its length;
- two codes of its *layers*: their numbers (`next_number`), counted from the first layer that this
  process has built, and from the last. One of the two must be equal on all ranks: with either
  alone, a model that only one rank has built before, or after, would look like a mismatch.

All messages of an exchange have the length of the layout that every rank expects. It is the one
that followed the last layout before: as the exchanges so far were the same on all ranks, so is what
they expect. A rank that has another layout to send sends its header and zeros. Everybody then sees
all headers, and so all take the same decision:

- everybody has the expected layout, the ordinary case: the contributions have arrived with it;
- everybody has the same other layout, as in the first exchange: a second collective brings them;
- ranks differ in layout or layers: `RankError`, on every rank.

On a GPU the host would have to wait to see the headers. Where a rank has sent the expected layout,
it checks them in the next exchange instead. A rank that has not waits, and raises at once.
"""

from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ghostbatch.errors import RankError
from ghostbatch.ops.running.groups import Group, gather, resolve
from ghostbatch.ops.running.stats import UNNUMBERED, RunningStats, count_numbered
from ghostbatch.ops.running.update import Contribution

HEADER = 3


class Layout(NamedTuple):
    """What fixes the length of a message."""

    code: int
    length: int


class Unread(NamedTuple):
    """Headers on their way from the GPU to the host."""

    headers: Tensor
    arrived: torch.Event
    layers: Sequence[RunningStats]


class Channel:
    """The exchanges of one process group on one device."""

    def __init__(self, group: Group, device: torch.device) -> None:
        self.group, self.device = group, device
        self.checks_later = device.type != "cpu"
        self._last = self._expected = Layout(0, HEADER)
        self._followed_by: dict[Layout, Layout] = {}
        self._unread: Unread | None = None
        self._numbers: tuple[list[int], Tensor] | None = None

    def exchange(
        self, layers: Sequence[RunningStats], own: Sequence[Contribution]
    ) -> list[list[Contribution]]:
        """Return the contributions of every rank, by layer, then by rank."""
        self._read_last()
        counts = [int(each.ghosts) for each in own]
        sums = [each.sums.flatten() for each in own]
        layout = Layout(encode_widths(layers), HEADER + len(sums) + sum(map(Tensor.numel, sums)))
        header = [layout.code, *encode_layers(layers)]
        if layout == self._expected:
            everyone = gather(self._pack([*header, *counts], sums), self.group)
            self._check(everyone[:, :HEADER], layers)
            everyone = everyone[:, HEADER:]
        else:
            zeros = sums[0].new_zeros(self._expected.length - HEADER)
            headers = gather(self._pack(header, [zeros]), self.group)[:, :HEADER]
            check(headers, layers)
            everyone = gather(self._pack(counts, sums), self.group)
        self._followed_by[self._last] = layout
        self._last = layout
        self._expected = self._followed_by.get(layout, layout)
        return _by_layer(everyone, own)

    def _pack(self, numbers: list[int], parts: Sequence[Tensor]) -> Tensor:
        """Return one vector of numbers and tensors, in float64, which holds either exactly."""
        if self._numbers is None or self._numbers[0] != numbers:  # mostly those of the last time
            self._numbers = (
                numbers,
                torch.tensor(numbers, dtype=torch.float64, device=self.device),
            )
        return torch.cat([self._numbers[1], *parts])

    def _check(self, headers: Tensor, layers: Sequence[RunningStats]) -> None:
        """Check the headers of all ranks now, or next time if they are on a GPU."""
        if not self.checks_later:
            check(headers, layers)
            return
        arrived = torch.Event(self.device)
        self._unread = Unread(headers.to("cpu", non_blocking=True), arrived, layers)
        arrived.record()

    def _read_last(self) -> None:
        unread, self._unread = self._unread, None
        if unread is not None:
            unread.arrived.synchronize()
            check(unread.headers, unread.layers)


CHANNELS: WeakKeyDictionary[object, dict[torch.device, Channel]] = WeakKeyDictionary()


def open_channel(group: Group, device: torch.device) -> Channel:
    """Return the channel of the group, as long as this process group lives."""
    return CHANNELS.setdefault(resolve(group), {}).setdefault(device, Channel(group, device))


def encode(what: object) -> int:
    """Return a hash that is equal in all processes; 48 bits, which float64 holds exactly."""
    return int.from_bytes(blake2b(repr(what).encode(), digest_size=6).digest())


def encode_widths(layers: Sequence[RunningStats]) -> int:
    """Return the code of the layers' widths, in order."""
    return encode([layer.mean.numel() for layer in layers])


def encode_layers(layers: Sequence[RunningStats]) -> tuple[int, int]:
    """Return the codes of the layers, numbered from the first and from the last that was built."""
    built = count_numbered()
    rules = [(layer.momentum, layer.policy) for layer in layers]
    numbers = [layer.number for layer in layers]
    from_last = [number if number == UNNUMBERED else built - number for number in numbers]
    return encode((numbers, rules)), encode((from_last, rules))


def check(headers: Tensor, layers: Sequence[RunningStats]) -> None:
    """Raise `RankError` unless all ranks have sent contributions of the same layers."""
    layouts, from_first, from_last = (len(set(codes)) for codes in headers.t().tolist())
    if layouts > 1 or min(from_first, from_last) > 1:
        raise mismatch(headers.tolist(), layers)


def mismatch(codes: Sequence[object], layers: Sequence[RunningStats]) -> RankError:
    """Return the error that names the ranks whose codes differ from the first rank's."""
    ranks = ", ".join(str(rank) for rank, code in enumerate(codes) if code != codes[0])
    widths = ", ".join(str(layer.mean.numel()) for layer in layers[:3])
    more = f" and {len(layers) - 3} more" if len(layers) > 3 else ""
    return RankError(
        f"running statistics: rank {ranks} has run other layers than rank 0, or not equally often "
        f"(this rank those of widths {widths}{more}); run the same layers on every rank, call "
        "gb.sync_statistics(model) on every rank after training-mode forwards without backward, or "
        "keep statistics to each rank with process_group=gb.LOCAL"
    )


def _by_layer(everyone: Tensor, own: Sequence[Contribution]) -> list[list[Contribution]]:
    """Split counts and sums of all ranks, (ranks, length), into contributions."""
    dtype = torch.float32
    for _, sums in own:
        dtype = torch.promote_types(dtype, sums.dtype)
    everyone = everyone.to(dtype)
    rows = everyone[:, len(own) :].split([each.sums.numel() for each in own], dim=1)
    return [
        [
            Contribution(everyone[rank, layer : layer + 1], row.view_as(own[layer].sums))
            for rank, row in enumerate(rows[layer].unbind())
        ]
        for layer in range(len(own))
    ]
