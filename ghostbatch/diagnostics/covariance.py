"""The covariance of a weight increment, by batch size and sampling scheme.

A step is dw = -(lr / M) sum of the gradients g_n of a batch of M out of N samples. With S the mean
of g g^T over all samples, gbar the mean of g and C = S - gbar gbar^T, the covariance of dw is lr^2
times

    "with" replacement               C / M
    "without" replacement            (N - M) / (N - 1) C / M
    "bernoulli": each independently  (1 / M - 1 / N) S

and two different batches of one permutation have the covariance -C / (N - 1). docs/paper.md derives
what holds for batches that straddle two permutations, and says where the paper differs.
"""

from dataclasses import dataclass
from functools import cached_property
from math import sqrt
from typing import Literal, get_args

import torch
from torch import Tensor

from ghostbatch.errors import InputError, check_choice
from ghostbatch.optim import lr_scale

Scheme = Literal["without", "with", "bernoulli"]
Rule = Literal["none", "sqrt", "linear", "noise"]


@dataclass(frozen=True)
class RuleCheck:
    """How well a rule keeps the covariance of the small batch's increments at a large batch."""

    rule: Rule
    ratio: float
    """Trace of the large batch's covariance over that of the small batch; 1 if it is kept."""
    cosine: float
    """Cosine between the two matrices; 1 if they differ only by a factor."""
    remainder: float
    """Norm of their difference over the norm of the small batch's covariance."""


@dataclass(frozen=True)
class IncrementCovariance:
    """First and second moments of per-sample gradients, which give the covariance of any batch."""

    mean: Tensor
    """gbar, (P,), in fp64 on the CPU."""
    second: Tensor
    """S, (P, P)."""
    samples: int
    """N. The moments are exact for these samples, unless random changes were drawn."""

    @cached_property
    def centred(self) -> Tensor:
        """C = S - gbar gbar^T."""
        return self.second - torch.outer(self.mean, self.mean)

    def covariance(
        self,
        batch: int,
        *,
        scheme: Scheme = "without",
        lr: float = 1.0,
        noise: float = 0.0,
        straddling: int = 0,
    ) -> Tensor:
        """Return the covariance of one increment, (P, P).

        Loss weights z_n ~ N(1, noise) add lr^2 noise S / M under every scheme. ``straddling`` is
        the number of samples from the next permutation, which matters for "without" alone.
        """
        self._check(batch, scheme)
        if not 0 <= straddling <= batch:
            raise InputError("straddling", f"{straddling} of {batch} samples", f"use 0 to {batch}")
        n, k = self.samples, straddling
        if scheme == "bernoulli":
            plain = (1 / batch - 1 / n) * self.second
        else:
            left = n - (k**2 + (batch - k) ** 2) / batch
            correction = 1.0 if scheme == "with" else left / max(1, n - 1)
            plain = correction / batch * self.centred
        return lr**2 * (plain + noise / batch * self.second)

    def between(
        self, *, scheme: Scheme = "without", lr: float = 1.0, overlap: float = 1.0
    ) -> Tensor:
        """Return the covariance between two batches.

        For "without", ``overlap`` is the sum of a_j b_j / M^2 over permutations j, of which the
        batches have a_j and b_j samples: 1 if both are of one permutation.
        """
        self._check(1, scheme)
        if scheme == "without":
            return -(lr**2) * overlap / (self.samples - 1) * self.centred
        return torch.zeros_like(self.second)

    def rule(
        self, rule: Rule, batch: int, base_batch: int, *, scheme: Scheme = "without"
    ) -> RuleCheck:
        """Compare increments at ``batch`` under a rule with those at ``base_batch``.

        "sqrt" is exact with replacement, and "noise" for Bernoulli selection. `remainder` has the
        differences otherwise.
        """
        check_choice("rule", rule, get_args(Rule))
        small = self.covariance(base_batch, scheme=scheme)
        if rule == "noise":
            if batch < base_batch:
                raise InputError("batch", f"{batch} is below base_batch {base_batch}", "raise it")
            large = self.covariance(batch, scheme=scheme, noise=batch / base_batch - 1)
        else:
            large = self.covariance(batch, scheme=scheme, lr=lr_scale(batch, base_batch, rule))
        return RuleCheck(
            rule=rule,
            ratio=float(large.trace() / small.trace()),
            cosine=cosine(large, small),
            remainder=float((large - small).norm() / small.norm()),
        )

    def remainder(
        self, rule: Rule, batch: int, base_batch: int, *, scheme: Scheme = "without"
    ) -> Tensor:
        """Return the covariance under a rule minus that of the small batch, in closed form."""
        n, gap = self.samples, 1 / base_batch - 1 / batch
        small = self.covariance(base_batch, scheme=scheme)
        if rule == "noise":
            excess = torch.outer(self.mean, self.mean)
            excess -= self.centred / (n - 1) if scheme == "without" else 0
            return gap * excess * (scheme != "bernoulli")
        factor = lr_scale(batch, base_batch, rule) ** 2 * base_batch / batch
        factor *= 1.0 if scheme == "with" else (n - batch) / (n - base_batch)
        return (factor - 1) * small

    def mean_to_deviation(self, batch: int, *, scheme: Scheme = "without") -> float:
        """Return the length of the mean step over the root-mean-square length of its deviation.

        The paper says that the mean is smaller by orders of magnitude.
        """
        deviation = sqrt(float(self.covariance(batch, scheme=scheme).trace()))
        return float(self.mean.norm()) / deviation if deviation else float("inf")

    def _check(self, batch: int, scheme: str) -> None:
        check_choice("scheme", scheme, get_args(Scheme))
        if batch < 1 or (scheme != "with" and batch > self.samples):
            problem = f"{batch} of {self.samples} samples"
            raise InputError("batch", problem, f"use 1 to {self.samples}")


def cosine(a: Tensor, b: Tensor) -> float:
    """Return the cosine between two matrices: 1 if and only if they differ by a positive factor.

    >>> round(cosine(torch.eye(2), 3 * torch.eye(2)), 6)
    1.0
    """
    return float((a * b).sum() / (a.norm() * b.norm()))


def effective_rank(covariance: Tensor) -> float:
    """Return (sum of eigenvalues)^2 / sum of their squares: about how many directions matter.

    >>> effective_rank(torch.diag(torch.tensor([2.0, 2.0, 0.0])))
    2.0
    """
    return float(covariance.trace() ** 2 / covariance.square().sum())
