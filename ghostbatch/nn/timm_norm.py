"""The ghost layer of timm's ``BatchNormAct2d``; only models of timm import this module."""

from torch import Tensor

from ghostbatch.nn.convert import register_conversion
from ghostbatch.nn.norm import GhostBatchNorm2d
from ghostbatch.ops.reference import Activation
from ghostbatch.optional import import_timm

import_timm()  # it also imports where torchvision's operators do not load
from timm.layers.norm_act import BatchNormAct2d  # noqa: E402


class GhostBatchNormAct2d(GhostBatchNorm2d, BatchNormAct2d):
    """Ghost batch norm, then the layer's ``drop`` and ``act``."""

    def forward(
        self,
        input: Tensor,  # noqa: A002 (nn.BatchNorm's name for it)
        residual: Tensor | None = None,
        activation: Activation | None = None,
        twice: bool = False,
    ) -> Tensor:
        """Return ``act(drop(norm(input)))``."""
        y = self.act(self.drop(super().forward(input, residual, activation)))
        return (y, y) if twice else y  # type: ignore[return-value]


register_conversion(BatchNormAct2d, GhostBatchNormAct2d)
