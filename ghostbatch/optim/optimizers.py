"""Optimizers as data: a frozen spec names a recipe's optimizer and builds it.

To add an optimizer, write one more spec with its own ``kind``, and name it in `OptimizerSpec` and
`OPTIMIZERS`.
"""

from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch

from ghostbatch.errors import InputError, check_choice
from ghostbatch.optim.groups import Parameters
from ghostbatch.optim.regime import Regime


@dataclass(frozen=True, kw_only=True)
class SGD:
    """SGD with the momentum and weight decay of the regime."""

    kind: ClassVar[str] = "sgd"
    """The tag of this spec in ``run.json``."""

    nesterov: bool = False
    """Use Nesterov's momentum; the paper does not."""

    def check(self, regime: Regime) -> None:
        """Refuse a regime that this optimizer cannot use."""
        if self.nesterov and not regime.momentum:
            raise InputError("optimizer.nesterov", "needs momentum", "set regime.momentum")

    def build(self, parameters: Parameters, regime: Regime) -> torch.optim.Optimizer:
        """Return the optimizer of parameters or groups with the regime's initial rates."""
        return torch.optim.SGD(
            parameters,
            lr=regime.lr,
            momentum=regime.momentum,
            weight_decay=regime.weight_decay,
            nesterov=self.nesterov,
            # A third of the time on a CPU; and only it can skip a step on a GPU: train/update.py.
            fused=True,
        )


OptimizerSpec = SGD
"""The type of a recipe's optimizer: the union of all specs."""

OPTIMIZERS: dict[str, type[OptimizerSpec]] = {spec.kind: spec for spec in (SGD,)}


def spec_to_dict(spec: OptimizerSpec) -> dict[str, Any]:
    """Return the spec as plain data for JSON, with its tag."""
    return {"kind": spec.kind, **asdict(spec)}


def spec_from_dict(fields: dict[str, Any]) -> OptimizerSpec:
    """Read what `spec_to_dict` wrote.

    >>> spec_from_dict({"kind": "sgd", "nesterov": True})
    SGD(nesterov=True)
    """
    options = dict(fields)
    kind = options.pop("kind")
    check_choice("optimizer", kind, OPTIMIZERS)
    return OPTIMIZERS[kind](**options)
