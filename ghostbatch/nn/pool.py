"""Pooling layers that are faster than PyTorch's on a GPU, and the same elsewhere."""

import torch.fx
from torch import Tensor, nn

from ghostbatch.ops.pool import max_pool2d, mean_pool2d

torch.fx.wrap("max_pool2d")  # one node each for torch.fx, which cannot trace their conditions
torch.fx.wrap("mean_pool2d")


class MaxPool2d(nn.MaxPool2d):
    """nn.MaxPool2d over 2 or 3 pixels with stride 2; on a GPU it runs at memory bandwidth."""

    def __init__(self, kernel_size: int) -> None:
        super().__init__(kernel_size, stride=2)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (nn.MaxPool2d's name for it)
        """From (N, C, H, W) to (N, C, H', W')."""
        return max_pool2d(input, self.kernel_size)  # type: ignore[arg-type]


class MeanPool2d(nn.AdaptiveAvgPool2d):
    """nn.AdaptiveAvgPool2d(1), with a gradient laid out as its input."""

    def __init__(self) -> None:
        super().__init__(1)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (nn.AdaptiveAvgPool2d's name for it)
        """From (N, C, H, W) to (N, C, 1, 1)."""
        return mean_pool2d(input)
