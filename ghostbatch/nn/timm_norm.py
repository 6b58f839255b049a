"""The ghost layer of timm's ``BatchNormAct2d``; only models of timm import this module."""

from timm.layers.norm_act import BatchNormAct2d
from torch import Tensor

from ghostbatch.nn.convert import register_conversion
from ghostbatch.nn.norm import GhostBatchNorm2d
from ghostbatch.ops.reference import Activation


class GhostBatchNormAct2d(GhostBatchNorm2d, BatchNormAct2d):
    """Ghost batch norm, then the layer's ``drop`` and ``act``."""

    def forward(
        self,
        input: Tensor,  # noqa: A002 (nn.BatchNorm's name for it)
        residual: Tensor | None = None,
        activation: Activation | None = None,
    ) -> Tensor:
        """Return ``act(drop(norm(input)))``."""
        normalised = super().forward(input, residual, activation)
        return self.act(self.drop(normalised))  # type: ignore[no-any-return]


register_conversion(BatchNormAct2d, GhostBatchNormAct2d)
