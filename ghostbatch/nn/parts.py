"""The blocks that the paper's networks are built from."""

from collections import OrderedDict
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from ghostbatch.nn.norm import GhostBatchNorm
from ghostbatch.nn.pool import MaxPool2d


def norm_relu(
    norm: nn.Module, x: Tensor, residual: Tensor | None = None, twice: bool = False
) -> Any:
    """Return ``relu(norm(x) + residual)``, in one kernel if the norm is a ghost layer.

    The layer is called as a module either way, so its hooks run; those of a ghost layer see the
    result after the ReLU. With ``twice`` the result is a pair, as `ghost_batch_norm` explains.
    """
    if isinstance(norm, GhostBatchNorm):
        return norm(x, residual=residual, activation="relu", twice=twice)
    y = norm(x)
    y = F.relu(y if residual is None else y + residual)
    return (y, y) if twice else y


class LinearNormReLU(nn.Module):
    """Linear, BatchNorm, ReLU."""

    def __init__(self, fan_in: int, fan_out: int, *, bias: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(fan_in, fan_out, bias=bias)
        self.norm = nn.BatchNorm1d(fan_out)

    def forward(self, x: Tensor) -> Tensor:
        """From (N, fan_in) to (N, fan_out)."""
        return norm_relu(self.norm, self.linear(x))  # type: ignore[no-any-return]


class ConvNormReLU(nn.Module):
    """Convolution without bias, max pooling if ``pool``, BatchNorm, residual add, ReLU.

    With ``padding`` None the convolution keeps the size at stride 1; pooling is 3x3 with stride 2.
    """

    twice = False
    """Whether the result is returned twice: see `join_gradients`."""

    def __init__(
        self,
        fan_in: int,
        fan_out: int,
        kernel: int = 3,
        *,
        stride: int = 1,
        padding: int | None = None,
        pool: bool = False,
    ) -> None:
        super().__init__()
        self.conv = conv(fan_in, fan_out, kernel, stride=stride, padding=padding)
        self.pool = MaxPool2d(3) if pool else nn.Identity()
        self.norm = nn.BatchNorm2d(fan_out)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Any:
        """From (N, fan_in, H, W) to (N, fan_out, ...)."""
        return norm_relu(self.norm, self.pool(self.conv(x)), residual, self.twice)


class BasicBlock(nn.Module):
    """Two 3x3 convolutions, each with its norm; the input is added before the last ReLU.

    If the size changes, the input is first passed through a 1x1 convolution and a norm.
    """

    def __init__(self, fan_in: int, fan_out: int, *, stride: int = 1) -> None:
        super().__init__()
        self.first = ConvNormReLU(fan_in, fan_out, stride=stride)
        self.second = ConvNormReLU(fan_out, fan_out)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or fan_in != fan_out:
            shortcut = conv(fan_in, fan_out, 1, stride=stride)
            self.shortcut = chain(conv=shortcut, norm=nn.BatchNorm2d(fan_out))

    def forward(self, x: Any) -> Any:
        """From (N, fan_in, H, W), or a pair of it, to (N, fan_out, H / stride, W / stride)."""
        left, right = x if isinstance(x, tuple) else (x, x)
        return self.second(self.first(left), residual=self.shortcut(right))


def join_gradients(model: nn.Module) -> None:
    """Let the blocks of a residual network pass their results on twice, in place.

    A block's result goes to a convolution and to the next shortcut. Autograd would add their
    gradients by a kernel of its own; ghost norm's backward adds two gradients while it reads them.
    """
    blocks = [layer for layer in model.modules() if isinstance(layer, BasicBlock)]
    for block in blocks[:-1]:
        block.second.twice = True
    if blocks and isinstance(stem := getattr(model, "stem", None), ConvNormReLU):
        stem.twice = True


def chain(**layers: nn.Module) -> nn.Sequential:
    """Return the layers one after the other, by name."""
    return nn.Sequential(OrderedDict(layers))


def conv(
    fan_in: int, fan_out: int, kernel: int, *, stride: int = 1, padding: int | None = None
) -> nn.Conv2d:
    """Return a convolution without bias, which the norm after it would subtract again."""
    padding = kernel // 2 if padding is None else padding
    return nn.Conv2d(fan_in, fan_out, kernel, stride, padding, bias=False)


def shrunk(size: int, kernel: int = 3, stride: int = 2, padding: int = 0) -> int:
    """Return the size of an image after a convolution or pooling.

    >>> shrunk(32), shrunk(shrunk(32))
    (15, 7)
    """
    return (size + 2 * padding - kernel) // stride + 1
