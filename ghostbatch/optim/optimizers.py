"""Optimizers as data: a frozen spec names a recipe's optimizer and builds it.

A spec has the name of the torch.optim class that it builds, but `LARS` and `LAMB` are our own
optimizers, so their specs are `LARSSpec` and `LAMBSpec`. A new spec has its own ``kind``, and is
named in `OptimizerKind`, `OptimizerSpec` and `OPTIMIZERS`.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import Any, ClassVar, Literal, Self

import torch

from ghostbatch.errors import InputError, check_choice, check_types
from ghostbatch.optim.groups import Parameters
from ghostbatch.optim.layerwise import LAMB, LARS, check_trust
from ghostbatch.optim.regime import DEFAULT_MOMENTUM, Regime
from ghostbatch.optim.scaling import Rule, check_betas, scale_adam

OptimizerKind = Literal["sgd", "adamw", "lars", "lamb"]
"""Names of the optimizers that a recipe can have."""

NOT_ADAPTED = MappingProxyType({"adapt": False})
"""The option of LARS and LAMB for a group that is not scaled to its norms."""


class Spec:
    """What most specs have in common."""

    kind: ClassVar[OptimizerKind]
    """The tag of the spec in ``run.json``."""
    moments: ClassVar[int] = 1
    """Tensors of the size of the weights that the optimizer keeps."""
    norm_options: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    """Options of the parameter group that holds norms and biases, see `norm_groups`."""

    def scaled(self, batch: int, base_batch: int, rule: Rule) -> Self:  # noqa: ARG002
        """Return the spec for a batch; of most optimizers only the regime's rate depends on it."""
        return self


@dataclass(frozen=True, kw_only=True)
class SGD(Spec):
    """SGD with the momentum and weight decay of the regime."""

    kind: ClassVar[OptimizerKind] = "sgd"

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


@dataclass(frozen=True, kw_only=True)
class AdamSpec(Spec):
    """What AdamW and LAMB have in common: betas in place of the regime's momentum."""

    moments: ClassVar[int] = 2

    beta1: float = 0.9
    """Decay of the average of the gradient; of AdamW, at base_batch."""
    beta2: float = 0.999
    """Decay of the average of the squared gradient; of AdamW, at base_batch."""
    eps: float = 1e-8
    """Added to the root of the average of the squared gradient, at base_batch."""

    def check(self, regime: Regime) -> None:
        """Refuse options out of range, and a momentum that the regime was given."""
        check_betas((self.beta1, self.beta2), self.eps, "optimizer.")
        if regime.momentum != DEFAULT_MOMENTUM:
            problem = f"{regime.momentum} was given, and {self.kind} has betas in its place"
            raise InputError("regime.momentum", problem, "leave it out, or set optimizer.beta1")


@dataclass(frozen=True, kw_only=True)
class AdamW(AdamSpec):
    """AdamW with the rate and weight decay of the regime, and betas in place of momentum.

    Under the square-root rule, betas and eps follow the batch by `scale_adam`. The weight decay is
    not scaled. The regime's default is meant for SGD; that of torch.optim.AdamW is 0.01.
    """

    kind: ClassVar[OptimizerKind] = "adamw"

    def scaled(self, batch: int, base_batch: int, rule: Rule) -> Self:
        """Return the spec for another batch; refuse one for which the square-root rule fails."""
        if rule != "sqrt":
            return self
        (beta1, beta2), eps = scale_adam((self.beta1, self.beta2), self.eps, batch, base_batch)
        return replace(self, beta1=beta1, beta2=beta2, eps=eps)

    def build(self, parameters: Parameters, regime: Regime) -> torch.optim.Optimizer:
        """Return the optimizer of parameters or groups with the regime's initial rates."""
        return torch.optim.AdamW(
            parameters,
            lr=regime.lr,
            betas=(self.beta1, self.beta2),
            eps=self.eps,
            weight_decay=regime.weight_decay,
            fused=True,  # as for SGD
        )


@dataclass(frozen=True, kw_only=True)
class LARSSpec(Spec):
    """`LARS` with the rate, momentum and weight decay of the regime.

    Norms and biases are not scaled to their norms: their steps have the regime's rate as it is.
    """

    kind: ClassVar[OptimizerKind] = "lars"
    norm_options: ClassVar[Mapping[str, Any]] = NOT_ADAPTED

    trust: float = 0.001
    """Trust coefficient: the length of a step at a rate of 1, as a part of the weights' norm."""

    def check(self, regime: Regime) -> None:  # noqa: ARG002
        """Refuse options out of range; any regime will do."""
        check_trust("optimizer.trust", self.trust)

    def build(self, parameters: Parameters, regime: Regime) -> torch.optim.Optimizer:
        """Return the optimizer of parameters or groups with the regime's initial rates."""
        lr, momentum, decay = regime.lr, regime.momentum, regime.weight_decay
        return LARS(parameters, lr, momentum=momentum, weight_decay=decay, trust=self.trust)


@dataclass(frozen=True, kw_only=True)
class LAMBSpec(AdamSpec):
    """`LAMB` with the rate and weight decay of the regime, and betas in place of momentum.

    Norms and biases are not scaled to their norms. Betas and eps are the same at every batch.
    """

    kind: ClassVar[OptimizerKind] = "lamb"
    norm_options: ClassVar[Mapping[str, Any]] = NOT_ADAPTED

    eps: float = 1e-6
    """Added to the root of the average of the squared gradient."""

    def build(self, parameters: Parameters, regime: Regime) -> torch.optim.Optimizer:
        """Return the optimizer of parameters or groups with the regime's initial rates."""
        betas, decay = (self.beta1, self.beta2), regime.weight_decay
        return LAMB(parameters, regime.lr, betas=betas, eps=self.eps, weight_decay=decay)


OptimizerSpec = SGD | AdamW | LARSSpec | LAMBSpec
"""The type of a recipe's optimizer: the union of all specs."""

OPTIMIZERS: dict[OptimizerKind, type[OptimizerSpec]] = {
    spec.kind: spec for spec in (SGD, AdamW, LARSSpec, LAMBSpec)
}
"""The spec of each optimizer, by name."""


def check_spec(spec: OptimizerSpec, regime: Regime) -> None:
    """Refuse a value that is not a spec, one of the wrong type in it, and an unsuitable regime."""
    if not isinstance(spec, OptimizerSpec):
        problem = f"{spec!r} is not an optimizer of ghostbatch.optim"
        raise InputError("optimizer", problem, "use optim.SGD(), for example")
    check_types(spec, "optimizer.")
    spec.check(regime)


def spec_to_dict(spec: OptimizerSpec) -> dict[str, Any]:
    """Return the spec as plain data for JSON, with its tag."""
    return {"kind": spec.kind, **asdict(spec)}


def spec_from_dict(fields: dict[str, Any]) -> OptimizerSpec:
    """Read what `spec_to_dict` wrote.

    >>> spec_from_dict({"kind": "sgd", "nesterov": True})
    SGD(nesterov=True)
    """
    options = dict(fields)
    kind: OptimizerKind = options.pop("kind")
    check_choice("optimizer", kind, OPTIMIZERS)
    return OPTIMIZERS[kind](**options)
