"""The pooling kernels, in Triton's interpreter, against F.max_pool2d."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close

from ghostbatch.nn.networks import MODELS
from ghostbatch.ops.pool import functional, max_pool2d, mean_pool2d

pytestmark = pytest.mark.usefixtures("interpreted")
launch = pytest.importorskip("ghostbatch.ops.pool.launch")

SETTINGS = {
    "packed": launch.Tuning(warps=1, channels=16),
    "a byte per output": launch.Tuning(warps=1, channels=16, pack=False),
    "three tiles per program": launch.Tuning(warps=1, channels=16, rounds=3),
    "chosen by shape": None,
}
SHAPES = [(2, 8, 8, 8), (3, 16, 7, 9), (2, 3, 5, 6), (5, 40, 3, 3), (4, 1, 4, 11)]


@pytest.fixture(params=SETTINGS)
def _settings(request, monkeypatch):
    if SETTINGS[request.param] is not None:
        monkeypatch.setattr(launch, "tuning", lambda *_: SETTINGS[request.param])


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Few distinct values, so that windows hold ties."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(-4, 5, shape, generator=generator).to(dtype) / 2
    return values.contiguous(memory_format=torch.channels_last)


def outcome(function, x: Tensor, dy: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The result and the gradient of the input."""
    x = x.detach().requires_grad_()
    y = function(x)
    dy = draw(*y.shape, dtype=y.dtype, seed=1) if dy is None else dy
    (dx,) = torch.autograd.grad(y, x, dy)
    return y.detach(), dx


@pytest.mark.usefixtures("_settings")
@pytest.mark.parametrize("kernel", [2, 3])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_results_and_gradients_equal_pytorchs_also_with_ties(shape, kernel, dtype):
    x = draw(*shape, dtype=dtype)
    fast = outcome(lambda x: max_pool2d(x, kernel), x)
    slow = outcome(lambda x: F.max_pool2d(x, kernel, 2), x)
    assert_close(fast, slow, rtol=0, atol=0)
    assert all(t.is_contiguous(memory_format=torch.channels_last) for t in fast)


@pytest.mark.parametrize("kernel", [2, 3])
def test_infinities_and_nan_propagate_as_in_pytorch(kernel):
    x = draw(4, 8, 9, 9)
    at = torch.Generator().manual_seed(3)
    for value in (torch.nan, torch.inf, -torch.inf):
        x[torch.rand(x.shape, generator=at) < 0.1] = value
    x[0] = -torch.inf
    exact = F.max_pool2d(x, kernel, 2)
    dy = draw(*exact.shape, seed=1).where(~exact.isnan(), 0)
    fast = outcome(lambda x: max_pool2d(x, kernel), x, dy)
    slow = outcome(lambda x: F.max_pool2d(x, kernel, 2), x, dy)
    assert exact.isnan().any()
    assert_close(fast, slow, rtol=0, atol=0, equal_nan=True)


def test_without_gradients_no_index_is_saved():
    x = draw(2, 8, 8, 8)
    _, index = launch.forward(x, 2, save=False)
    assert index.numel() == 0
    assert_close(max_pool2d(x, 2), F.max_pool2d(x, 2, 2), rtol=0, atol=0)


def test_a_gradient_in_another_layout_is_taken():
    x, dy = draw(2, 8, 8, 8), draw(2, 8, 4, 4, seed=5).contiguous()
    fast = outcome(lambda x: max_pool2d(x, 2), x, dy)
    assert_close(fast, outcome(lambda x: F.max_pool2d(x, 2, 2), x, dy), rtol=0, atol=0)


@pytest.mark.parametrize(
    "x",
    [draw(2, 4, 8, 8).contiguous(), draw(2, 4, 8, 8).double()[:, :, :3], draw(0, 4, 8, 8)],
    ids=["contiguous", "fp64 slice", "empty"],
)
def test_what_the_kernels_do_not_take_goes_to_pytorch(x):
    assert not functional._kernels_apply(x, 3)
    assert_close(max_pool2d(x, 3), F.max_pool2d(x, 3, 2))


def test_the_mean_over_pixels_and_its_gradient_equal_pytorchs():
    x = draw(2, 8, 4, 6)
    fast = outcome(mean_pool2d, x)
    slow = outcome(lambda x: F.adaptive_avg_pool2d(x, 1), x)
    assert_close(fast, slow, check_stride=False)
    assert fast[1].is_contiguous(memory_format=torch.channels_last)


def test_a_network_pools_by_the_kernels_and_computes_what_it_did(monkeypatch):
    model = MODELS["c1"](image_size=8).eval()
    x = draw(2, 3, 8, 8)
    model.to(memory_format=torch.channels_last)
    pooled = []
    forward = launch.forward
    monkeypatch.setattr(launch, "forward", lambda *a, **k: pooled.append(1) or forward(*a, **k))
    y = model(x)
    assert len(pooled) == 2
    monkeypatch.setenv("GHOSTBATCH_KERNELS", "0")
    assert_close(y, model(x))


@pytest.mark.parametrize("kernel", [2, 3])
def test_second_derivatives_equal_pytorchs(kernel):
    x, other = draw(2, 8, 7, 7).float(), draw(2, 8, 7, 7, seed=4)
    outcomes = []
    for function in (lambda x: max_pool2d(x, kernel), lambda x: F.max_pool2d(x, kernel, 2)):
        leaf = x.clone().requires_grad_()
        (dx,) = torch.autograd.grad(function(leaf).pow(3).sum(), leaf, create_graph=True)
        outcomes.append(torch.autograd.grad((dx * other).sum() + leaf.pow(2).sum(), leaf))
    assert_close(*outcomes)


@pytest.mark.parametrize("network", ["c1", "resnet44"])
def test_torch_func_sees_plain_pooling(network):
    model = MODELS[network](image_size=8).eval().to(memory_format=torch.channels_last)
    x = draw(2, 3, 8, 8)
    each = torch.vmap(lambda image: model(image[None])[0])(x)
    assert_close(each, model(x), rtol=1e-4, atol=1e-4)
    gradient = torch.func.grad(lambda x: model(x).sum())(x)
    leaf = x.clone().requires_grad_()
    model(leaf).sum().backward()
    assert_close(gradient, leaf.grad, rtol=1e-4, atol=1e-4)
