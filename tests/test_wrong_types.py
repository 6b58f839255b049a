"""A value of a wrong type is refused in one line that names the argument."""

import numpy as np
import pytest
import torch
from torch import nn

import ghostbatch as gb
from ghostbatch.data.catalog import find_data_dir
from ghostbatch.diagnostics import largest_eigenvalue
from ghostbatch.optim import WeightAverage

REGIME = gb.Regime(lr=0.1, epochs=2)
SIZES = {"samples_per_epoch": 100, "batch": 10}


def layer():
    return nn.Linear(2, 2)


def scheduler(regime=REGIME, **sizes):
    optimizer = torch.optim.SGD(layer().parameters(), lr=0.1)
    return gb.RegimeScheduler(optimizer, regime, **{**SIZES, **sizes})


def potential(loss=lambda _: 1.0, **options):
    return gb.random_potential(layer(), loss, **{"radius": 1.0, "samples": 2, **options})


def noise(n=4, generator=None):
    return gb.noise_weights(n, 4, 1, generator or torch.Generator())


def scale(parts, samples=1):
    return gb.GradientNoiseScale(layer()).update(parts, samples)


def train(**options):
    return gb.train("f1-digits", **options)


CALLS = [
    *(("model", lambda f=f: f(None)) for f in (gb.to_ghost, gb.to_plain, gb.sync_statistics)),
    *(("model", lambda f=f: f(3)) for f in (gb.fold_convolutions, gb.unfold_convolutions)),
    *(("model", lambda f=f: f(None)) for f in (gb.WeightDistance, gb.GradientNoiseScale)),
    ("model", lambda: gb.recalibrate(None, [])),
    ("model", lambda: gb.random_potential(None, lambda _: 1.0, radius=1.0)),
    ("model", lambda: largest_eigenvalue(None, lambda _: 1.0)),
    ("batch", lambda: gb.lr_scale(None, 1)),
    ("base_batch", lambda: gb.lr_scale(1, None)),
    ("regime", lambda: scheduler(None)),
    ("samples_per_epoch", lambda: scheduler(samples_per_epoch=None)),
    ("batch", lambda: scheduler(batch=None)),
    *(("n", lambda n=n: noise(n)) for n in (-1, 2.5, "a", None, True)),
    ("generator", lambda: noise(generator=3)),
    ("regime.drops", lambda: gb.Regime(lr=0.1, epochs=9, drops="")),
    ("regime.lr", lambda: gb.Regime(lr=10**400, epochs=1)),
    ("regime.drops", lambda: gb.Regime(lr=0.1, epochs=9, drops=np.array([[5, 0.01]]))),
    ("state_dict", lambda: gb.WeightDistance(layer()).load_state_dict({})),
    ("state_dict", lambda: WeightAverage(layer(), 0.5).load_state_dict({})),
    ("state_dict", lambda: gb.GradientNoiseScale(layer()).load_state_dict({})),
    *(("radius", lambda r=r: potential(radius=r)) for r in ("a", None, torch.tensor(1.0), 0, -1)),
    *(("samples", lambda n=n: potential(samples=n)) for n in (5.5, "5", None)),
    *(("bins", lambda b=b: potential(bins=b)) for b in (5, "ab", (2.5,))),
    *(("loss", lambda v=v: potential(lambda _: v)) for v in (None, "a", torch.ones(2))),
    ("updates", lambda: gb.fit_diffusion(["a", "b"], [1, 2])),
    ("updates", lambda: gb.fit_diffusion([1, 2, [3]], [1, 2, 3])),
    ("distances", lambda: gb.fit_diffusion([1, 2, 3, 4], [1, 2, "a", 4])),
    ("level", lambda: gb.fit_diffusion([1, 2, 3, 4], [1, 2, 3, 4], level="a")),
    ("samples", lambda: gb.GradientNoiseScale(layer()).part(None)),
    ("samples", lambda: scale([torch.ones(3), torch.ones(3)], 2.5)),
    ("samples", lambda: scale([torch.ones(3), torch.ones(3)], None)),
    ("parts", lambda: scale([torch.ones(3), torch.ones(4)])),
    ("parts", lambda: scale([np.ones(3), np.ones(3)])),
    ("folder", lambda: gb.load_run(None)),
    ("data_dir", lambda: find_data_dir(3)),
    ("out", lambda: train(out=3)),
    ("evaluations", lambda: train(evaluations=None)),
    *((name, lambda name=name: train(**{name: 3})) for name in ("on_record", "should_stop")),
    ("process_group", lambda: gb.GhostBatchNorm2d(3, process_group=3)),
]


@pytest.mark.parametrize(
    ("field", "call"), CALLS, ids=[f"{n} {field}" for n, (field, _) in enumerate(CALLS)]
)
def test_a_wrong_value_is_refused_in_one_line_with_the_name_of_its_argument(field, call):
    with pytest.raises(gb.InputError) as raised:
        call()
    assert raised.value.field == field
    assert "\n" not in str(raised.value)


def test_numbers_of_numpy_and_flat_gradients_are_taken():
    found = potential(lambda _: np.float32(1), radius=np.float32(1), samples=np.int64(2))
    assert found.losses == (1.0, 1.0)
    assert potential(bins=np.array([2, 3])).binned.keys() == {2, 3}
    assert noise(np.int64(4)).shape == (4,)
    scale(torch.ones(2, 3).unbind(), [1, 1])
    scale([torch.ones(()), torch.ones(())])
