"""Optimizer specs: they build optimizers of the regime's rates, and a step can be skipped."""

import copy
from dataclasses import FrozenInstanceError
from typing import get_args

import pytest
import torch
from torch import nn

from ghostbatch import Regime
from ghostbatch.errors import InputError
from ghostbatch.optim import (
    LAMB,
    LARS,
    OPTIMIZERS,
    SGD,
    AdamW,
    LAMBSpec,
    LARSSpec,
    OptimizerKind,
    norm_groups,
    spec_from_dict,
    spec_to_dict,
)
from ghostbatch.optim.optimizers import check_spec

REGIME = Regime(lr=0.5, epochs=2, drops=((1, 0.25),), momentum=0.8, weight_decay=0.01)
ADAM = Regime(lr=0.5, epochs=2, weight_decay=0.01)
BETAS = {"beta1": 0.8, "beta2": 0.9, "eps": 1e-4}
BUILT_BETAS = {"betas": (0.8, 0.9), "eps": 1e-4}
BUILDS = [  # spec, regime, the optimizer's class, its options
    (SGD(), REGIME, torch.optim.SGD, {"momentum": 0.8, "nesterov": False}),
    (SGD(nesterov=True), REGIME, torch.optim.SGD, {"momentum": 0.8, "nesterov": True}),
    (AdamW(**BETAS), ADAM, torch.optim.AdamW, {**BUILT_BETAS, "fused": True}),
    (LARSSpec(trust=0.02), REGIME, LARS, {"momentum": 0.8, "trust": 0.02, "adapt": True}),
    (LAMBSpec(**BETAS), ADAM, LAMB, {**BUILT_BETAS, "adapt": True}),
]
SPECS = [SGD(), AdamW(), LARSSpec(), LAMBSpec()]


@pytest.mark.parametrize(("spec", "regime", "kind", "options"), BUILDS)
def test_an_optimizer_takes_its_numbers_from_the_regime_and_the_spec(spec, regime, kind, options):
    built = spec.build(nn.Linear(2, 2).parameters(), regime)
    assert type(built) is kind
    assert built.defaults.items() >= {"lr": 0.5, "weight_decay": 0.01, **options}.items()


@pytest.mark.parametrize("spec", [build[0] for build in BUILDS])
def test_a_spec_survives_plain_data_and_carries_its_tag(spec):
    written = spec_to_dict(spec)
    assert written["kind"] == spec.kind
    assert spec_from_dict(written) == spec
    assert OPTIMIZERS[spec.kind] is type(spec)


def test_every_kind_has_its_spec():
    assert get_args(OptimizerKind) == tuple(OPTIMIZERS) == tuple(spec.kind for spec in SPECS)


def test_an_unknown_kind_is_refused_by_name():
    line = r"^optimizer: 'lion' is unknown; choose one of sgd, adamw, lars, lamb$"
    with pytest.raises(InputError, match=line):
        spec_from_dict({"kind": "lion"})


def test_a_spec_is_frozen():
    with pytest.raises(FrozenInstanceError):
        SGD().nesterov = True


@pytest.mark.parametrize(
    ("spec", "regime", "line"),
    [
        (AdamW(beta1=1), ADAM, r"optimizer\.beta1: 1 is not in \[0, 1\)"),
        (AdamW(eps=0), ADAM, r"optimizer\.eps: 0 is not in \(0, 1\)"),
        (LAMBSpec(beta2=-0.1), ADAM, r"optimizer\.beta2: -0\.1 is not in \[0, 1\)"),
        (LARSSpec(trust=-1), REGIME, r"optimizer\.trust: -1 is not above 0"),
        (AdamW(beta1="0.9"), ADAM, r"optimizer\.beta1: '0\.9' is not a number"),
        (SGD(nesterov="no"), REGIME, r"optimizer\.nesterov: 'no' is not True or False"),
        (AdamW(), REGIME, r"regime\.momentum: 0\.8 was given, and adamw has betas in its place"),
        (LAMBSpec(), REGIME, r"regime\.momentum: 0\.8 was given, and lamb has betas in its place"),
    ],
)
def test_what_an_optimizer_cannot_use_is_refused(spec, regime, line):
    with pytest.raises(InputError, match=f"^{line}"):
        check_spec(spec, regime)


def test_under_the_square_root_rule_adam_scales_its_betas_and_eps():
    scaled = AdamW(beta1=0.9, beta2=0.99, eps=1e-8).scaled(512, 128, "sqrt")
    assert (scaled.beta1, scaled.beta2) == pytest.approx((0.6, 0.96), rel=1e-12)
    assert scaled.eps == pytest.approx(5e-9, rel=1e-12)


@pytest.mark.parametrize("rule", ["none", "linear", "sqrt"])
@pytest.mark.parametrize("spec", SPECS)
def test_nothing_else_follows_the_batch(spec, rule):
    if (type(spec), rule) != (AdamW, "sqrt"):
        assert spec.scaled(512, 128, rule) is spec


@pytest.mark.parametrize("spec", SPECS, ids=[spec.kind for spec in SPECS])
def test_a_step_where_found_inf_is_1_never_happened(spec):
    """Neither weights nor state differ from those of an optimizer without that step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    twin = copy.deepcopy(model)
    one, other = (
        spec.build(norm_groups(each, **spec.norm_options), ADAM) for each in (model, twin)
    )
    for found_inf in (0, 1, 0, 1):
        gradients = [torch.randn_like(weight) for weight in model.parameters()]
        for weight, right, gradient in zip(
            model.parameters(), twin.parameters(), gradients, strict=True
        ):
            weight.grad = gradient * torch.inf if found_inf else gradient
            right.grad = gradient.clone()
        one.found_inf = torch.tensor(float(found_inf))
        one.step()
        if not found_inf:
            other.step()
        for weight, right in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(weight, right)
            assert one.state[weight].keys() == other.state[right].keys()
            for name, kept in one.state[weight].items():
                assert torch.equal(kept, other.state[right][name])


@pytest.mark.parametrize("spec", SPECS, ids=[spec.kind for spec in SPECS])
def test_an_optimizer_keeps_as_many_moments_as_its_spec_says(spec):
    weight = nn.Parameter(torch.ones(3))
    optimizer = spec.build([weight], ADAM)
    weight.grad = torch.ones(3)
    optimizer.step()
    kept = [each for each in optimizer.state[weight].values() if each.shape == weight.shape]
    assert len(kept) == spec.moments
