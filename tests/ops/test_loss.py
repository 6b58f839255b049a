"""The loss kernel, in Triton's interpreter, against tensor code."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close

from ghostbatch.ops.loss import summed_cross_entropy

pytestmark = pytest.mark.usefixtures("interpreted")


def outcome(outputs: Tensor, labels: Tensor, *options) -> list[Tensor]:
    """The three sums and the gradient of a third of the loss."""
    outputs = outputs.detach().requires_grad_()
    loss, sums = summed_cross_entropy(outputs, labels, *options)
    assert not sums.requires_grad
    (loss / 3).backward()
    return [loss.detach(), sums, outputs.grad]


def drawn(shape: tuple[int, int], is_weighted: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Outputs, labels and weights of a batch."""
    draw = torch.Generator().manual_seed(1)
    outputs = 4 * torch.randn(shape, generator=draw)
    labels = torch.randint(shape[1], shape[:1], generator=draw)
    return outputs, labels, torch.randn(shape[:1], generator=draw) if is_weighted else None


def both(outputs, labels, weights, monkeypatch) -> tuple[list[Tensor], list[Tensor]]:
    fast = outcome(outputs, labels, weights)
    monkeypatch.setenv("GHOSTBATCH_KERNELS", "0")
    return fast, outcome(outputs, labels, weights)


@pytest.mark.parametrize("is_weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("shape", [(5, 10), (64, 3), (1, 2), (70, 100), (3, 1000)], ids=str)
def test_losses_answers_and_gradients_are_those_of_pytorch(shape, is_weighted, monkeypatch):
    outputs, labels, weights = drawn(shape, is_weighted)
    fast, slow = both(outputs, labels, weights, monkeypatch)
    assert_close(fast, slow, rtol=1e-5, atol=1e-6)
    assert fast[1][1] == (outputs.argmax(1) == labels).sum()


@pytest.mark.parametrize("kernels", ["interpret", "0"])
@pytest.mark.parametrize("is_weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("shape", [(5, 10), (70, 100), (1, 2)], ids=str)
def test_smoothed_losses_are_those_of_pytorch_and_the_sums_are_not_smoothed(
    shape, is_weighted, kernels, monkeypatch
):
    monkeypatch.setenv("GHOSTBATCH_KERNELS", kernels)
    outputs, labels, weights = drawn(shape, is_weighted)
    loss, sums, grad = outcome(outputs, labels, weights, 0.1)
    outputs.requires_grad_()
    losses = F.cross_entropy(outputs, labels, reduction="none", label_smoothing=0.1)
    expected = (losses if weights is None else losses * weights).sum()
    (expected / 3).backward()
    assert_close((loss, grad), (expected.detach(), outputs.grad), rtol=1e-5, atol=1e-5)
    assert_close(sums, outcome(outputs, labels, weights)[1])


def test_the_first_of_equal_outputs_is_the_answer(monkeypatch):
    outputs = torch.tensor([[1.0, 2.0, 2.0], [3.0, 3.0, 3.0]]).repeat(2, 1)
    fast, slow = both(outputs, torch.tensor([1, 0, 2, 1]), None, monkeypatch)
    assert fast[1][1] == slow[1][1] == 2


def test_gradients_of_bf16_outputs_are_scaled_before_they_are_rounded(monkeypatch):
    outputs = torch.randn(16, 10).bfloat16()
    _, slow = both(outputs.float(), torch.arange(16) % 10, None, monkeypatch)
    monkeypatch.setenv("GHOSTBATCH_KERNELS", "interpret")
    (*_, grad) = outcome(outputs, torch.arange(16) % 10, None)
    assert grad.dtype == torch.bfloat16
    assert_close(grad.float(), slow[2], rtol=2**-7, atol=1e-6)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # NumPy's, as interpreter
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_an_output_that_is_not_finite_makes_the_loss_nan_or_infinite(bad, monkeypatch):
    outputs = torch.zeros(4, 3)
    outputs[2, 1] = bad
    fast, slow = both(outputs, torch.zeros(4, dtype=torch.long), None, monkeypatch)
    assert not fast[0].isfinite()
    assert not slow[0].isfinite()
    assert not fast[1][0].isfinite()
