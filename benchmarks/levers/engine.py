"""One update of training as one CUDA graph, around the package's own networks.

An update gathers and augments a batch, runs forward and backward, clips, steps and adds to the sums
that are reported. It reads nothing from the host but its draws and rates, which lie in tensors on
the device, and the host reads nothing but the sums, whenever it likes. Each lever can be left out.

What torch.optim.SGD(fused=True) can do inside a graph (torch 2.11): the learning rate may be a
tensor on the device; ``grad_scale`` (the gradients are divided by it) does the clipping without a
pass of its own; ``found_inf`` = 1 skips the step. Weight decay and momentum must be numbers: a
regime that changes weight decay needs a new graph for each phase, or `flat.Flat`, which reads all
rates from the device.
"""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from batch import BatchMaker
from flat import Flat
from fold import ColumnConv2d, FoldedConv2d, fold_convolutions, take_columns
from joined import join_gradients
from loss import cross_entropy
from pool import to_fast_pools
from timing import DEVICE
from torch import Tensor, nn

from ghostbatch import to_ghost
from ghostbatch.data.augment import PadCropFlip
from ghostbatch.nn.networks import find_model

CLIP = 5.0


@dataclass(frozen=True)
class Levers:
    """Which levers are pulled."""

    graph: bool = True
    """Replay the update as one CUDA graph."""
    fold: bool = True
    """Fold narrow convolutions."""
    pool: bool = True
    """Pool with the kernels of `pool`."""
    flat: bool = True
    """Weights in one buffer with a bf16 shadow, and SGD on it; else autocast and torch's SGD."""
    join: bool = True
    """Add the two gradients of a residual block's output inside the norm's backward."""
    loss: bool = True
    """Cross entropy, accuracy and their gradient by the kernels of `loss`; needs ``flat``."""
    columns: bool = True
    """Write batches as patches for a first layer that is faster so."""
    compiled: bool = False
    """torch.compile the network."""


EAGER = Levers(
    graph=False, fold=False, pool=False, flat=False, join=False, loss=False, columns=False
)
VARIANTS: dict[str, Levers] = {  # each is the one before plus one lever
    "eager": EAGER,
    "graph": (graph := replace(EAGER, graph=True)),
    "+fold": (fold := replace(graph, fold=True)),
    "+pool": (pool := replace(fold, pool=True)),
    "+flat": (flat := replace(pool, flat=True)),
    "+join": (join := replace(flat, join=True)),
    "+loss": (loss := replace(join, loss=True)),
    "+columns": replace(loss, columns=True),
}


@dataclass(frozen=True)
class Data:
    """Random images on the device, as a data set would be."""

    images: Tensor
    labels: Tensor

    @staticmethod
    def random(samples: int = 50000, pixels: int = 32, classes: int = 10) -> "Data":
        """Images whose brightness tells their class, so that there is something to learn."""
        generator = torch.Generator().manual_seed(0)
        labels = torch.randint(classes, (samples,), generator=generator)
        size = (samples, pixels, pixels, 3)
        images = torch.randint(156, size, generator=generator, dtype=torch.uint8)
        images += (labels * (100 // classes)).to(torch.uint8).view(-1, 1, 1, 1)
        return Data(images.to(DEVICE).permute(0, 3, 1, 2), labels.to(DEVICE))


class Update:
    """One network in training; calling it with a batch's draws does one update."""

    def __init__(
        self,
        network: str,
        data: Data,
        *,
        batch: int,
        levers: Levers,
        ghost: int | None = 128,
        dtype: torch.dtype = torch.bfloat16,
        seed: int = 0,
        dropout: bool = True,
    ) -> None:
        torch.manual_seed(seed)
        model = find_model(network)(10).to(DEVICE)
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        if not dropout:
            for layer in model.modules():
                if isinstance(layer, nn.Dropout):
                    layer.p = 0.0
        if ghost is not None:
            to_ghost(model, ghost)
        if levers.pool:
            to_fast_pools(model)
        if levers.fold:
            fold_convolutions(model)
        if levers.columns:
            take_columns(model)
        if levers.join:
            join_gradients(model)
        self.model, self.levers, self.dtype = model, levers, dtype
        self.rates = torch.tensor([0.1, 0.9, 1e-4, CLIP], device=DEVICE)
        self.sums = torch.zeros(5, device=DEVICE)
        """Loss, accuracy, gradient norm, clipped, skipped."""
        augmentation = PadCropFlip(pad=4, fill=0)
        mean, deviation = (torch.full((3,), value, device=DEVICE) for value in (120.0, 60.0))
        self.maker = BatchMaker(
            data.images, data.labels, mean, deviation, augmentation, batch,
            *_input(model, dtype),
        )  # fmt: skip
        if levers.flat:
            self.flat = Flat(model, dtype)
        else:
            self.optimizer = torch.optim.SGD(
                model.parameters(), self.rates[0], momentum=0.9, weight_decay=1e-4, fused=True
            )
        self.forward = torch.compile(model, dynamic=False) if levers.compiled else model
        self.stream = torch.cuda.Stream() if DEVICE == "cuda" else None
        self.replay: torch.cuda.CUDAGraph | None = None

    def __call__(self, draws: Tensor) -> None:
        """Do one update with the batch that ``draws`` says; the host does not wait."""
        self.maker.draws.copy_(draws, non_blocking=True)
        if self.replay is not None:
            self.replay.replay()
        else:
            self.compute()

    def compute(self) -> None:
        """Do one update with the draws and rates that lie on the device."""
        maker = self.maker
        maker.make()
        if self.levers.flat:
            outputs = self.forward(maker.x)
        else:
            with torch.autocast(DEVICE, self.dtype, enabled=self.dtype != torch.float32):
                outputs = self.forward(maker.x)
        if self.levers.loss:
            loss, slope = cross_entropy(outputs, maker.y, self.sums)
            gradients = torch.autograd.grad(outputs, self.flat.leaves, slope)
            self.flat.step(gradients, self.rates, loss, self.sums[2:])
            return
        loss = F.cross_entropy(outputs.float(), maker.y)
        if self.levers.flat:
            gradients = torch.autograd.grad(loss, self.flat.leaves)
            self.flat.step(gradients, self.rates, loss.detach(), self.sums[2:])
        else:
            self.optimizer.zero_grad()
            loss.backward()
            self._clipped_step(loss.detach())
        correct = (outputs.detach().argmax(1) == maker.y).float().mean()
        self.sums[:2].add_(torch.stack([loss.detach(), correct]))

    def _clipped_step(self, loss: Tensor) -> None:
        """Step torch's fused SGD: clipped by ``grad_scale``, skipped by ``found_inf``."""
        norm = nn.utils.get_total_norm([p.grad for p in self.model.parameters()])
        finite = norm.isfinite() & loss.isfinite()
        self.optimizer.grad_scale = ((norm + 1e-6) / CLIP).clamp(min=1.0)  # type: ignore[attr-defined]
        self.optimizer.found_inf = (~finite).float()  # type: ignore[attr-defined]
        self.optimizer.step()
        found = torch.stack([norm.where(finite, 0), norm > CLIP, ~finite])
        self.sums[2:].add_(found)

    def capture(self) -> "Update":
        """Capture the update in a graph, if that lever is pulled; the state is as before."""
        if not self.levers.graph or self.stream is None:
            return self
        self.warm_up()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.stream):
            self.compute()
        self.replay = graph
        return self

    def warm_up(self) -> None:
        """Run two updates on the stream of the capture, then put the state back.

        Optimizer buffers, compiled kernels, workspaces and cuDNN's choices exist afterwards, and
        autograd has met the parameters on the stream on which they will be captured.
        """
        assert self.stream is not None  # noqa: S101
        saved = [tensor.clone() for tensor in self.state()]
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            self.compute()
            self.compute()
        torch.cuda.synchronize()
        for tensor, before in zip(self.state(), saved, strict=False):
            tensor.copy_(before)
        for tensor in self.state()[len(saved) :]:  # momentum that the first update made
            tensor.zero_()
        if self.levers.flat:
            self.flat.refresh()
        torch.cuda.synchronize()

    def state(self) -> list[Tensor]:
        """Return every tensor that an update changes, momentum last."""
        momentum = (
            [self.flat.momentum]
            if self.levers.flat
            else [state["momentum_buffer"] for state in self.optimizer.state.values()]
        )
        weights = [p.detach() for p in self.model.parameters()]
        return [*weights, *self.model.buffers(), self.sums, *momentum]


def _input(model: nn.Module, dtype: torch.dtype) -> tuple[int, torch.dtype, int]:
    """Return channels, dtype and patch size of the batches that the first convolution takes."""
    first = next(layer for layer in model.modules() if isinstance(layer, nn.Conv2d))
    if isinstance(first, ColumnConv2d):
        return first.width, dtype, first.kernel_size[0]
    folded = first.fold.channels if isinstance(first, FoldedConv2d) else 0
    return max(first.in_channels, folded), dtype, 1
