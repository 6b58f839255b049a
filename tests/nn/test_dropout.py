"""Dropout by position: as random as PyTorch's, and the same however the batch is cut."""

import shutil
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from ghostbatch.draws import key
from ghostbatch.errors import InputError
from ghostbatch.nn import BatchPosition, DropConnect, key_dropout
from ghostbatch.nn.dropout import keep_mask

SAMPLES, FEATURES = 256, 1024


@pytest.fixture
def position():
    position = BatchPosition()
    position.set(key(0, "dropout", 3), first=0)
    return position


def keyed(layer, position):
    """A dropout layer at its position in a model."""
    key_dropout(nn.Sequential(layer), position)
    return layer


def at(position, update, first=0):
    position.set(key(0, "dropout", update), first)
    return position


@pytest.mark.parametrize("p", [0.001, 0.1, 0.5, 0.9])
def test_values_are_dropped_at_their_rate_and_the_rest_scaled(position, p):
    x = torch.ones(SAMPLES, FEATURES)
    y = keyed(nn.Dropout(p), position)(x)
    assert y.unique().tolist() == pytest.approx([0, 1 / (1 - p)])
    count = x.numel()
    five_sigma = 5 * (p * (1 - p) * count) ** 0.5
    assert float((y == 0).sum()) == pytest.approx(p * count, abs=five_sigma)


@pytest.mark.parametrize("dim", [0, 1])
def test_every_row_and_every_column_is_dropped_at_the_rate(position, dim):
    kept = keep_mask(position, 1, SAMPLES, (FEATURES,), 0.5).double()
    count = kept.shape[dim]
    z = (kept.sum(dim) - count / 2) / (count / 4) ** 0.5
    assert float(z.abs().max()) < 5
    assert float(z.square().mean()) == pytest.approx(1, abs=5 * (2 / z.numel()) ** 0.5)


def correlation(a, b):
    """In units of its standard deviation for independent fair coins."""
    a, b = (2 * x.double() - 1 for x in (a, b))
    return float((a * b).sum()) / a.numel() ** 0.5


@pytest.mark.parametrize("step", [1, 2, 7, 64])
def test_neighbours_in_row_column_update_and_layer_are_uncorrelated(position, step):
    def mask(layer=1):
        return keep_mask(position, layer, SAMPLES, (FEATURES,), 0.5)

    here = mask()
    others = {
        "row": (here[step:], here[:-step]),
        "column": (here[:, step:], here[:, :-step]),
        "layer": (mask(layer=1 + step), here),
        "update": (keep_mask(at(BatchPosition(), 3 + step), 1, SAMPLES, (FEATURES,), 0.5), here),
    }
    for name, pair in others.items():
        assert abs(correlation(*pair)) < 5, name


@given(
    cuts=st.lists(st.integers(1, 39), max_size=5),
    first=st.integers(0, 2**40),
    update=st.integers(0, 2**40),
)
def test_the_masks_of_pieces_are_the_mask_of_the_whole(cuts, first, update):
    position = BatchPosition()
    layer = keyed(nn.Dropout(0.5), position)
    x = torch.ones(40, 9)
    at(position, update, first)
    whole = layer(x)
    pieces = []
    for start, end in pairwise([0, *sorted(set(cuts)), 40]):
        at(position, update, first + start)
        pieces.append(layer(x[start:end]))
    assert torch.cat(pieces).equal(whole)


def test_update_layer_and_position_each_change_the_mask(position):
    model = nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5))
    key_dropout(model, position)
    x = torch.ones(8, 64)
    here = model[0](x)
    assert model[0](x).equal(here), "the same position, the same mask"
    assert not model[1](x).equal(here)
    assert not model[0](x)[0].equal(here[1])
    at(position, 4)
    assert not model[0](x).equal(here)


@pytest.mark.parametrize(
    "kind", [nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d], ids=lambda k: k.__name__
)
def test_evaluation_and_p_0_are_the_identity_and_p_1_drops_all(position, kind):
    x = torch.randn(4, 3, *(2,) * {"1d": 1, "2d": 2, "3d": 3}.get(kind.__name__[-2:], 1))
    assert keyed(kind(0.5), position).eval()(x) is x
    assert keyed(kind(0.0), position)(x).equal(x)
    assert keyed(kind(1.0), position)(x).equal(torch.zeros_like(x))


@pytest.mark.parametrize(
    ("kind", "dims"), [(nn.Dropout1d, 1), (nn.Dropout2d, 2), (nn.Dropout3d, 3)]
)
def test_channels_are_dropped_whole(position, kind, dims):
    x = torch.ones(64, 16, *(3,) * dims)
    y = keyed(kind(0.25), position)(x).flatten(2)
    assert y.eq(y[:, :, :1]).all()
    dropped = float((y[:, :, 0] == 0).double().mean())
    assert dropped == pytest.approx(0.25, abs=5 * (0.25 * 0.75 / 1024) ** 0.5)


@pytest.mark.parametrize("kind", [nn.Dropout, nn.Dropout2d])
def test_in_place_is_the_same_in_its_place(position, kind):
    x = torch.randn(4, 8, 2, 2)
    expected = keyed(kind(0.5), position)(x)
    y = keyed(kind(0.5, inplace=True), position)(x)
    assert y is x
    assert y.equal(expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_types_keep_their_type_and_the_mask(position, dtype):
    layer = keyed(nn.Dropout(0.5), position)
    x = torch.ones(8, 32)
    y = layer(x.to(dtype))
    assert y.dtype == dtype
    assert y.float().equal(layer(x))


def test_gradients_pass_where_values_do(position):
    x = torch.randn(8, 32, requires_grad=True)
    y = keyed(nn.Dropout(0.5), position)(x)
    y.sum().backward()
    assert x.grad.equal((y != 0) * 2.0)


def test_names_types_and_state_are_those_of_the_model_before(position):
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.3), nn.Dropout2d(0.2, inplace=True))
    before, text = list(model.state_dict()), str(model)
    key_dropout(model, position)
    assert list(model.state_dict()) == before
    assert str(model).replace("Keyed", "") == text
    assert isinstance(model[1], nn.Dropout)


def test_a_model_that_is_keyed_again_takes_its_masks_from_the_new_position(position):
    other = BatchPosition()
    model = nn.Sequential(nn.Dropout(0.5), nn.Dropout2d(0.5))
    assert key_dropout(model, position) == key_dropout(model, other) == 2
    assert [layer.position for layer in model] == [other, other]


@pytest.mark.parametrize("p", [1.0, -0.5, 1.5, torch.nan])
def test_dropconnect_refuses_a_p_that_leaves_no_weights_to_scale(p):
    with pytest.raises(InputError, match=r"^p: .* is not a probability below 1; use"):
        DropConnect(nn.Linear(2, 2), p)


def test_a_subclass_that_adds_behaviour_is_left_alone(position):
    class Quiet(nn.Dropout):
        def forward(self, input):  # noqa: A002
            return input

    layer = keyed(Quiet(0.5), position)
    assert type(layer) is Quiet


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_forward_that_is_run_again_in_backward_has_the_same_mask(position, reentrant):
    layer = keyed(nn.Dropout(0.5), position)
    seen = []

    def block(x):
        y = layer(x)
        seen.append(y.detach())
        return y.sin()

    x = torch.randn(8, 32, requires_grad=True)
    checkpoint(block, x, use_reentrant=reentrant).sum().backward()
    assert len(seen) == 2
    assert seen[0].equal(seen[1])
    assert x.grad.equal((seen[0] != 0) * 2.0 * seen[0].cos())


def check_compiled(layer, position, backend):
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    x = torch.ones(4, 8, 3, 3)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for update, first in ((0, 0), (1, 0), (2, 4), (2**40, 2**33)):
            at(position, update, first)
            assert compiled(x).equal(layer(x)), (update, first)


@pytest.mark.parametrize("kind", [nn.Dropout, nn.Dropout2d])
def test_one_compilation_serves_every_update_and_piece(position, kind):
    check_compiled(keyed(kind(0.5), position), position, "aot_eager")


@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")
@pytest.mark.skipif(not shutil.which("g++"), reason="inductor needs a C++ compiler")
def test_inductor_draws_the_masks_of_eager_code(position):
    check_compiled(keyed(nn.Dropout(0.5), position), position, "inductor")


@pytest.mark.usefixtures("interpreted")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy, in the interpreter
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("p", [0.3, 0.5, 1.0])
@pytest.mark.parametrize(
    ("make", "shape"),
    [(nn.Dropout, (5, 300)), (nn.Dropout, (3, 2, 7)), (nn.Dropout2d, (6, 9, 4, 5))],
    ids=["features", "images", "channels"],
)
def test_the_kernel_drops_and_scales_as_tensor_code_does(
    position, make, shape, p, dtype, monkeypatch
):
    at(position, update=5, first=11)
    outcomes = []
    for kernels in ("interpret", "0"):
        monkeypatch.setenv("GHOSTBATCH_KERNELS", kernels)
        x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
        x[0] = torch.inf
        x.requires_grad_()
        y = keyed(make(p), position)(x)
        y.backward(torch.ones_like(y))
        outcomes.append([y.detach(), x.grad])
    # The interpreter rounds bf16 to within one unit in the last place.
    rtol = 2**-7 if dtype == torch.bfloat16 else 0
    torch.testing.assert_close(*outcomes, rtol=rtol, atol=0, equal_nan=True)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("kernels", ["interpret", "0"])
def test_backward_uses_the_masks_of_its_forward_also_twice(position, kernels, monkeypatch):
    monkeypatch.setenv("GHOSTBATCH_KERNELS", kernels)
    layer = keyed(nn.Dropout(0.5), position)
    x = torch.randn(4, 50, requires_grad=True)
    y = layer(x)
    mask = (y != 0) * 2.0
    at(position, update=9)
    layer(x)
    (dx,) = torch.autograd.grad(y.pow(3).sum(), x, create_graph=True)
    torch.testing.assert_close(dx, 3 * y.detach() ** 2 * mask)
    (ddx,) = torch.autograd.grad(dx.sum() + x.pow(2).sum(), x)
    torch.testing.assert_close(ddx, 6 * y.detach() * mask**2 + 2 * x.detach())
