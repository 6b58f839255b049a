"""Population statistics: running statistics that are averages over many batches."""

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ghostbatch.errors import InputError, check_is
from ghostbatch.nn.keep import kept_buffers
from ghostbatch.nn.norm import GhostBatchNorm
from ghostbatch.ops.running.groups import LOCAL, Group, gather, ranks_in
from ghostbatch.ops.running.pending import forget_pending

Model = TypeVar("Model", bound=nn.Module)


def recalibrate(model: Model, batches: Iterable[Tensor | Sequence[Any]]) -> Model:
    """Set the running statistics of every norm layer to their average over ``batches``.

    A layer gets the mean of the means, and the mean of the unbiased variances, of all ghosts that
    it sees; of all batches, if it is a plain BatchNorm. Meanwhile norm layers normalise each ghost
    by its own statistics, as in training, and all other layers are in evaluation mode: the averages
    are for evaluation, which has no dropout. Parameters, modes, ``num_batches_tracked`` and
    PyTorch's random generators are left as they were. If a batch raises an error, nothing changes.

    On several ranks call it on all of them, each with its own batches. Ghost layers then average
    over the ranks of their process group.

    Args:
        model: the model, which is also returned.
        batches: inputs of the model, or tuples whose first item is the input.

    """
    check_is("model", model, nn.Module, "a torch.nn.Module")
    if isinstance(batches, Tensor):
        raise InputError("batches", "this is a single tensor, not several", "pass [inputs]")
    norms = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.running_mean is not None]
    averages = {norm: Average(norm) for norm in norms}
    devices = {t.device for t in chain(model.parameters(), model.buffers()) if t.is_cuda}
    with (
        torch.no_grad(),
        torch.random.fork_rng(devices=list(devices)),
        _uncompiled(),
        kept_buffers(model),
        _collecting(model, averages),
    ):
        for batch in batches:
            x = batch[0] if isinstance(batch, Sequence) else batch
            if not (isinstance(x, Tensor) and x.numel() == 0):  # plain norms would count it
                model(x)
    _sum_over_ranks(averages)
    if norms and not any(average.ghosts for average in averages.values()):
        raise InputError(
            "batches", "no norm layer has seen one", "pass at least one; a generator yields once"
        )
    for norm, average in averages.items():
        average.copy_to(norm)
    return model


class Average:
    """Sums over ghosts of a layer's means and unbiased variances, in fp64."""

    def __init__(self, norm: _BatchNorm) -> None:
        device = norm.running_mean.device  # type: ignore[union-attr]
        self.ghosts = torch.zeros((), dtype=torch.float64, device=device)
        self.sums = torch.zeros(2, norm.num_features, dtype=torch.float64, device=device)

    def begin(self, norm: _BatchNorm, _input: Any) -> None:
        """Reset the layer's buffers before a forward, which then leaves its ghosts' averages."""
        for buffer in (norm.running_mean, norm.running_var, norm.num_batches_tracked):
            buffer.zero_()  # type: ignore[union-attr]

    def add(self, norm: _BatchNorm, _input: Any, _output: Any) -> None:
        """Add the averages that the forward has left, times the number of its ghosts."""
        ghosts = norm.num_batches_tracked
        averages = torch.stack([norm.running_mean, norm.running_var])  # type: ignore[list-item]
        self.sums += averages.double() * ghosts  # type: ignore[operator]
        self.ghosts += ghosts  # type: ignore[arg-type]

    def copy_to(self, norm: _BatchNorm) -> None:
        """Set the layer's running statistics, unless it has seen nothing.

        Earlier contributions that wait for those of other ranks would change them later.
        """
        if self.ghosts:
            forget_pending(norm.running_mean)
            norm.running_mean.copy_(self.sums[0] / self.ghosts)  # type: ignore[union-attr]
            norm.running_var.copy_(self.sums[1] / self.ghosts)  # type: ignore[union-attr]


@contextmanager
def _collecting(model: nn.Module, averages: dict[_BatchNorm, Average]) -> Iterator[None]:
    """Let every forward of a norm layer add to its average; the layer's own buffers stay as is."""
    with ExitStack() as stack:

        def replace(layer: nn.Module, **options: Any) -> None:
            for name, value in options.items():
                stack.callback(setattr, layer, name, getattr(layer, name))
                setattr(layer, name, value)

        for module in model.modules():
            replace(module, training=module in averages)
        for norm, average in averages.items():
            replace(norm, momentum=None, track_running_stats=True)
            for name in ("running_mean", "running_var"):
                replace(norm, **{name: getattr(norm, name).clone()})
            replace(norm, num_batches_tracked=average.ghosts.long())
            if isinstance(norm, GhostBatchNorm):
                replace(norm, running="sequential", process_group=LOCAL)
            stack.callback(norm.register_forward_pre_hook(average.begin, prepend=True).remove)
            stack.callback(norm.register_forward_hook(average.add).remove)
        yield


def _sum_over_ranks(averages: dict[_BatchNorm, Average]) -> None:
    """Sum the averages of ghost layers over their groups: one collective for each group."""
    by_group: dict[Group, list[Average]] = {}
    for norm, average in averages.items():
        if isinstance(norm, GhostBatchNorm) and ranks_in(norm.process_group) > 1:
            by_group.setdefault(norm.process_group, []).append(average)
    for group, members in by_group.items():
        sums = [tensor for average in members for tensor in (average.ghosts, average.sums)]
        total = gather(torch.cat([tensor.flatten() for tensor in sums]), group).sum(0)
        parts = total.split([tensor.numel() for tensor in sums])
        for tensor, part in zip(sums, parts, strict=True):
            tensor.copy_(part.view_as(tensor))


def _uncompiled() -> AbstractContextManager[Any]:
    """Run compiled models as plain Python: compiled code ignores hooks that were added later."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled; its import takes seconds
        return nullcontext()
    return torch.compiler.set_stance("force_eager")  # type: ignore[no-any-return]
